#define COTERIE_ISA avx512
#include "attention.h"

#include "attention_kernels.h"

namespace coterie {

const AttentionKernels& avx512_attention() {
    static const AttentionKernels kernels{"avx512", avx512::forward, avx512::backward};
    return kernels;
}

}  // namespace coterie
