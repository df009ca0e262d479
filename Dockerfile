# Two images from one file:
#   docker build --target gateway -t kvsplice-gateway .   HTTP face; no torch inside
#   docker build --target worker  -t kvsplice-worker .    prefill, decode, fetch-model
# TORCH_INDEX names a further package index with another build of torch, such as PyTorch's CPU builds for a small image:
# of the same version, pip takes the one with a local label (+cpu). What torch depends on still comes from the main index.

FROM python:3.12-slim AS base
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    KVSPLICE_CACHE=/models \
    HF_HOME=/models/hub
RUN useradd --create-home --uid 1000 kvsplice && install --directory --owner=kvsplice /models
WORKDIR /app
ENTRYPOINT ["kvsplice"]

FROM base AS worker
# The CPU kernels are compiled at first use, for the CPU that the image then runs on.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=""
# Triton builds the module that launches GPU kernels at first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# The big layer first: it changes with the pinned versions only.
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch==2.13.0
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY kvtransfer kvtransfer
COPY grammar grammar
COPY engine engine
COPY prefill prefill
COPY decode decode
COPY gateway gateway
COPY launcher launcher
COPY experiments experiments
RUN pip install -c constraints.txt '.[worker,convert]'
USER kvsplice

FROM base AS gateway
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY kvtransfer kvtransfer
COPY grammar grammar
COPY engine engine
COPY prefill prefill
COPY decode decode
COPY gateway gateway
COPY launcher launcher
COPY experiments experiments
RUN pip install -c constraints.txt '.[gateway]' && ! python -c 'import torch' 2>/dev/null
USER kvsplice
EXPOSE 8000 8790
