// Normal draws that are kept: a layer draws the same ones in every call, and a draw takes a logarithm and a cosine.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "draws.h"
#include "interrupt.h"

namespace coterie {

// The draws (a, b, c) of a stream for a < lists, b < rows, c < columns, one behind the other.
using Normals = std::shared_ptr<const std::vector<float>>;

class KeptNormals {
public:
    Normals of(const Draws& draws, Stream stream, int64_t lists, int64_t rows, int64_t columns) {
        Key key{draws.seed, draws.layer, stream, lists, rows, columns};
        if (Normals known = find(key)) return known;
        auto drawn = std::make_shared<std::vector<float>>();
        drawn->reserve(lists * rows * columns);
        for (int64_t a = 0; a < lists; a++)
            for (int64_t b = 0; b < rows; b++) {
                breathe();
                for (int64_t c = 0; c < columns; c++)
                    drawn->push_back(static_cast<float>(draws.normal(stream, a, b, c)));
            }
        keep(key, drawn);
        return drawn;
    }

private:
    using Key = std::tuple<uint64_t, int64_t, Stream, int64_t, int64_t, int64_t>;
    static constexpr size_t kMost = 1 << 21, kEntries = 256;  // numbers, and lists of them

    Normals find(const Key& key) {
        std::lock_guard<std::mutex> lock(guard_);
        for (auto entry = kept_.begin(); entry != kept_.end(); entry++)
            if (entry->first == key) {
                kept_.splice(kept_.begin(), kept_, entry);
                return entry->second;
            }
        return nullptr;
    }

    // The ones that were used last stay.
    void keep(const Key& key, const Normals& drawn) {
        if (drawn->size() > kMost / 4) return;
        std::lock_guard<std::mutex> lock(guard_);
        kept_.emplace_front(key, drawn);
        numbers_ += drawn->size();
        while (numbers_ > kMost || kept_.size() > kEntries) {
            numbers_ -= kept_.back().second->size();
            kept_.pop_back();
        }
    }

    std::mutex guard_;
    std::list<std::pair<Key, Normals>> kept_;
    size_t numbers_ = 0;
};

inline KeptNormals& kept_normals() {
    static KeptNormals kept;
    return kept;
}

}  // namespace coterie
