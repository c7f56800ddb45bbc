#define COTERIE_ISA avx2
#include "attention.h"

#include "attention_kernels.h"

namespace coterie {

const AttentionKernels& avx2_attention() {
    static const AttentionKernels kernels{"avx2", avx2::forward, avx2::backward};
    return kernels;
}

}  // namespace coterie
