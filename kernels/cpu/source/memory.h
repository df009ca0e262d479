// Scratch memory.
#pragma once

#include <cstdlib>
#include <memory>

#include "common.h"

namespace kvsplice {

constexpr int kSlots = 11;  // pieces of scratch memory that one source file uses

struct Aligned {
    void operator()(void* memory) const { std::free(memory); }
};

// Memory of one thread, kept from call to call: asking the system for it anew would cost a page fault every 4 KiB.
template <class E>
static E* thread_memory(int which, i64 count) {
    static thread_local std::unique_ptr<void, Aligned> memory[kSlots];
    static thread_local i64 sizes[kSlots] = {};
    const i64 bytes = (count * i64(sizeof(E)) + 63) / 64 * 64;
    if (bytes > sizes[which]) {
        memory[which].reset(std::aligned_alloc(64, bytes));
        sizes[which] = bytes;
    }
    return (E*)memory[which].get();
}

}  // namespace kvsplice
