// A tensor of Python's as the module takes it: any dtype, device, shape and strides, through DLPack. Nothing is copied,
// or an op would write to the copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>

namespace coterie {

namespace nb = nanobind;

class Tensor {
public:
    size_t ndim() const { return static_cast<size_t>(view_.ndim); }
    size_t shape(size_t axis) const { return static_cast<size_t>(view_.shape[axis]); }
    int64_t stride(size_t axis) const { return view_.strides[axis]; }
    nb::dlpack::dtype dtype() const { return view_.dtype; }
    int device_type() const { return view_.device.device_type; }
    void* data() const { return static_cast<char*>(view_.data) + view_.byte_offset; }

    size_t size() const {
        size_t found = 1;
        for (size_t axis = 0; axis < ndim(); axis++) found *= shape(axis);
        return found;
    }

    // Of a tensor whose type says how C may look at it, which takes a hundredth of what asking in Python takes.
    bool look_at(nb::handle tensor) noexcept {
        Look look = look_of(Py_TYPE(tensor.ptr()));
        if (!look) return false;
        if (look(tensor.ptr(), &view_)) {
            PyErr_Clear();  // whoever asks next says what is wrong
            return false;
        }
        owner_ = nb::borrow(tensor);
        return true;
    }

    // Of any array that Python can export.
    void take(nb::ndarray<> array) {
        view_ = {
            .data = array.data(),
            .device = {array.device_type(), array.device_id()},
            .ndim = static_cast<int32_t>(array.ndim()),
            .dtype = array.dtype(),
            .shape = const_cast<int64_t*>(array.shape_ptr()),
            .strides = const_cast<int64_t*>(array.stride_ptr()),
        };
        array_ = std::move(array);
    }

private:
    using Look = int (*)(void* tensor, nb::dlpack::dltensor* view);

    // The table of functions that a type may offer, as DLPack 1.3 lays it out.
    struct Exchange {
        uint32_t major, minor;
        Exchange* before;
        void *allocate, *own, *give;
        Look look;
    };

    static Look look_of(PyTypeObject* type) noexcept {
        static PyTypeObject* known = nullptr;  // guarded by the GIL, as everything here
        static Look look = nullptr;
        if (type == known) return look;
        known = nullptr, look = nullptr;
        PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
        if (capsule && PyCapsule_CheckExact(capsule))
            if (auto* table = static_cast<Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api")))
                if (table->major == 1) look = table->look;
        Py_XDECREF(capsule);
        PyErr_Clear();
        if (look) {
            Py_INCREF(type);  // so that no other type can ever be at its address
            known = type;
        }
        return look;
    }

    nb::dlpack::dltensor view_{};
    nb::object owner_{};  // its shape and strides are those of the tensor itself
    nb::ndarray<> array_{};
};

}  // namespace coterie

namespace nanobind::detail {

template <>
struct type_caster<coterie::Tensor> {
    NB_TYPE_CASTER(coterie::Tensor, const_name("tensor"))

    bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
        if (source.is_none()) return false;
        if (value.look_at(source)) return true;
        make_caster<ndarray<>> array;
        if (!array.from_python(source, static_cast<uint8_t>(flags), cleanup)) return false;
        value.take(std::move(array.value));
        return true;
    }
};

}  // namespace nanobind::detail
