#define COTERIE_ISA avx2
#include "kernels.h"

#include "backward.h"
#include "forward.h"
#include "hashes.h"
#include "kmeans.h"
#include "means.h"
#include "polytope.h"
#include "top_keys.h"

namespace coterie {

const Kernels& avx2_kernels() {
    static const Kernels kernels{
        "avx2",
        avx2::forward,
        avx2::backward,
        avx2::means,
        avx2::means_backward,
        {avx2::order_by, avx2::smyrf_orders, avx2::euclidean_kmeans, avx2::hamming_kmeans,
         avx2::cluster_means, avx2::top_keys, avx2::cross_polytope},
    };
    return kernels;
}

}  // namespace coterie
