// Large arrays that go back to the system as soon as they are done with: malloc would keep them for this process. What
// is new is 0, and large pages are so before anyone writes to them.
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace coterie {

template <class T>
struct PageAllocator {
    using value_type = T;
    PageAllocator() = default;
    template <class U>
    PageAllocator(const PageAllocator<U>&) {}

    T* allocate(size_t count) {
#if defined(__linux__)
        if (count * sizeof(T) >= kLarge) {
            void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) throw std::bad_alloc();
            return static_cast<T*>(memory);
        }
#endif
        void* memory = ::operator new(count * sizeof(T));
        return static_cast<T*>(std::memset(memory, 0, count * sizeof(T)));
    }
    // Instead of writing another 0.
    void construct(T*) {}
    void deallocate(T* memory, size_t count) {
#if defined(__linux__)
        if (count * sizeof(T) >= kLarge) {
            munmap(memory, count * sizeof(T));
            return;
        }
#endif
        ::operator delete(memory);
    }
    template <class U>
    bool operator==(const PageAllocator<U>&) const {
        return true;
    }
    template <class U>
    bool operator!=(const PageAllocator<U>&) const {
        return false;
    }

private:
    static constexpr size_t kLarge = size_t{1} << 20;
};

template <class T>
using Pages = std::vector<T, PageAllocator<T>>;

}  // namespace coterie
