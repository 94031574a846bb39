// `Mover.notice_resized` of tiers.py: looks at storages that are being copied from where their owner holds them.

#pragma once

#include "slots.hpp"
#include "tensor.hpp"

namespace {

// Whether a record is still being copied; then its storage is in `data`.
Answer being_copied(PyObject* record, PyObject* moving, Ref* data) {
  const bool fields_known = is_record(record);
  const Ref state(fields_known ? Py_NewRef(fields.state(record)) : PyObject_GetAttr(record, name_state));
  *data = Ref(fields_known ? Py_NewRef(fields.data(record)) : state ? PyObject_GetAttr(record, name_data) : nullptr);
  if (!*data) {
    return Answer::failed;
  }
  bool moves = false;
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(moving); ++place) {
    moves = moves || PyTuple_GET_ITEM(moving, place) == state.get();
  }
  return moves && data->get() != Py_None ? Answer::yes : Answer::no;
}

// Takes the first off the turn, and puts it back at its end if it is still being copied; false with an error.
bool look_at_first(PyObject* turn, PyObject* moving) {
  const Ref record = known.popleft(turn);
  Ref data;
  const Answer moves = record ? being_copied(record.get(), moving, &data) : Answer::failed;
  if (moves != Answer::yes) {
    return moves == Answer::no;
  }
  if (!known.append(turn, record.get())) {
    return false;
  }
  const Ref then(is_record(record.get()) ? Py_NewRef(fields.address(record.get())) : PyObject_GetAttr(record.get(), name_address));
  long long now = 0, before = 0;
  if (!address_of(data.get(), &now) || !integer(then, &before)) {
    return false;
  }
  return now == before || PyObject_SetAttr(record.get(), name_was_resized, Py_True) == 0;
}

// At most so many of the first of `turn`; false with an error.
bool look_in_turn(PyObject* turn, Py_ssize_t most, PyObject* moving) {
  const Py_ssize_t size = PyObject_Size(turn);
  for (Py_ssize_t looked = 0; looked < size && looked < most; ++looked) {
    if (!look_at_first(turn, moving)) {
      return false;
    }
  }
  return size >= 0;
}

// notice_resized(turn, most, moving): at most so many of the first of `turn` are looked at.
PyObject* notice_resized(PyObject*, PyObject* arguments) {
  PyObject *turn, *moving;
  Py_ssize_t most = 0;
  if (!PyArg_ParseTuple(arguments, "OnO!:notice_resized", &turn, &most, &PyTuple_Type, &moving)) {
    return nullptr;
  }
  return look_in_turn(turn, most, moving) ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace
