// What this module was told of PyTorch and of the package, and the names that it asks for.

#pragma once

#include "python.hpp"

namespace {

// What `setup` was told: PyTorch's types and functions, and ours.
struct Known {
  PyObject *tensor, *parameter, *storage, *float32, *cpu;  // of PyTorch: three types, a dtype, a device
  PyObject* weak_ref_lock;                                 // of its storages
  PyObject *make_lock, *make_deque;
  PyObject *regions;                                       // that are open: a list, of all threads'
  PyObject *check_version, *replaced, *view_in, *unpack, *own_counter;
  PyObject *static_name, *small_name;                      // reasons
  PyObject *resident, *released, *spilling, *spilled, *fetching;
  PyObject *moving;                                        // a tuple of such states
  PyObject *layout_class, *stayed, *row_mover;             // classes
  PyObject *numbers;                                       // of the records
  PyObject* empty;                                         // `empty` of handles.py
  Py_ssize_t look_at;                                      // LOOK_AT of tiers.py
  long long bounce_bytes, small_bytes, min_alignment;      // of cpu_tier.py and row_tier.py
  long long span_alignment;                                // SPAN_ALIGNMENT of identity.py
  Getter base, device, dtype, shape;
  Method detach;
  Method append, popleft;                                  // of a deque
} known;

#define ACTOFFLOAD_NAMES(X)                                                                                           \
  X(nbytes) X(cpu) X(type) X(append) X(locked) X(acquire) X(release) X(changes) X(data) X(device)                     \
  X(get) X(passed) X(drop) X(look_at) X(look_ahead) X(fetch_ahead) X(state) X(address) X(was_resized) X(drain)        \
  X(_place) X(begin_alone) X(obtain) X(alignment) X(pending_limit_bytes) X(pending_bytes) X(largest_bytes)            \
  X(largest_moved_bytes) X(flush) X(give_room_back) X(_full_bytes) X(_open)

#define ACTOFFLOAD_DECLARE(text) PyObject* name_##text;
ACTOFFLOAD_NAMES(ACTOFFLOAD_DECLARE)
#undef ACTOFFLOAD_DECLARE
PyObject* name_distributed_tensor;

bool intern_names() {
#define ACTOFFLOAD_INTERN(text)                           \
  name_##text = PyUnicode_InternFromString(#text);        \
  if (name_##text == nullptr) {                           \
    return false;                                         \
  }
  ACTOFFLOAD_NAMES(ACTOFFLOAD_INTERN)
#undef ACTOFFLOAD_INTERN
  name_distributed_tensor = PyUnicode_InternFromString("torch.distributed.tensor");
  return name_distributed_tensor != nullptr;
}

// Puts something at the end of a list, or of a deque, which most are.
bool append_to(PyObject* list, PyObject* what) {
  const bool deque = reinterpret_cast<PyObject*>(Py_TYPE(list)) == known.make_deque;
  return static_cast<bool>(deque ? known.append(list, what) : Ref(PyObject_CallMethodOneArg(list, name_append, what)));
}

}  // namespace
