// The attention kernels of each instruction set, and the choice between them.
#pragma once

#include <string>

#include "arrays.h"

namespace coterie {

struct AttentionKernels {
    const char* name;
    void (*forward)(const Call&, const Forward&);
    void (*backward)(const Call&, const Backward&);
};

const AttentionKernels& portable_attention();
// Only where COTERIE_X86 is defined:
const AttentionKernels& avx2_attention();
const AttentionKernels& avx512_attention();

// The best that this CPU runs, or the one that COTERIE_ISA in the environment names.
const AttentionKernels& attention_kernels();

}  // namespace coterie
