#define COTERIE_ISA avx512
#include "kernels.h"

#include "backward.h"
#include "forward.h"
#include "hashes.h"
#include "kmeans.h"
#include "means.h"
#include "polytope.h"
#include "top_keys.h"

namespace coterie {

const Kernels& avx512_kernels() {
    static const Kernels kernels{
        "avx512",
        avx512::forward,
        avx512::backward,
        avx512::means,
        avx512::means_backward,
        {avx512::order_by, avx512::smyrf_orders, avx512::euclidean_kmeans, avx512::hamming_kmeans,
         avx512::cluster_means, avx512::top_keys, avx512::cross_polytope},
    };
    return kernels;
}

}  // namespace coterie
