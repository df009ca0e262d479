"""The GPU backend, in Triton (Tillet et al. 2019). Imported only when it is chosen: `kernels` works without triton.

launch.py      one kernel call as a value, so that it can be run, or compiled ahead of time
configs.py     tile sizes by architecture: the one table
softmax.py     what both attentions share
formats.py     float8 and other formats of a pool
decode.py      one query a row over split keys, and the combination of the splits
prefill.py     many queries a row, causal
rope_store.py, move_kv.py, elementwise.py
backend.py     all of them as a `kernels.face.Kernels`
aot.py         compiles every kernel for every architecture without a GPU, and reads the machine code
"""
