#define COTERIE_ISA portable
#include "attention.h"

#include "attention_kernels.h"

namespace coterie {

const AttentionKernels& portable_attention() {
    static const AttentionKernels kernels{"portable", portable::forward, portable::backward};
    return kernels;
}

}  // namespace coterie
