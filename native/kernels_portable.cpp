#define COTERIE_ISA portable
#include "kernels.h"

#include "backward.h"
#include "forward.h"
#include "hashes.h"
#include "kmeans.h"
#include "means.h"
#include "polytope.h"
#include "top_keys.h"

namespace coterie {

const Kernels& portable_kernels() {
    static const Kernels kernels{
        "portable",
        portable::forward,
        portable::backward,
        portable::means,
        portable::means_backward,
        {portable::order_by, portable::smyrf_orders, portable::euclidean_kmeans, portable::hamming_kmeans,
         portable::cluster_means, portable::top_keys, portable::cross_polytope},
    };
    return kernels;
}

}  // namespace coterie
