// `Stayed` of handles.py, from when backward passes it to its death.

#pragma once

#include "ahead.hpp"
#include "kept.hpp"

namespace {

struct Stayed {
  PyObject_HEAD
  Lane* lane;
  PyObject* owner;      // the Storer
  StaysRecord* record;  // null: it was never handed out
  at::TensorBase alias;
  long long version;
  long round;
  char lent;
};

extern PyTypeObject stayed_type;

Stayed* as_stayed(PyObject* object) { return reinterpret_cast<Stayed*>(object); }

// A handle that is none yet: nothing happens if it dies before `record` is set.
Ref make_stayed(Lane* lane, PyObject* owner, at::TensorBase alias) {
  Stayed* const stayed = PyObject_New(Stayed, &stayed_type);
  if (stayed != nullptr) {
    stayed->lane = reinterpret_cast<Lane*>(Py_NewRef(reinterpret_cast<PyObject*>(lane)));
    stayed->owner = Py_NewRef(owner);
    stayed->record = nullptr;
    stayed->version = version_of(alias);
    new (&stayed->alias) at::TensorBase(std::move(alias));
    stayed->round = 0;
    stayed->lent = 0;
  }
  return Ref(reinterpret_cast<PyObject*>(stayed));
}

void stayed_belongs(Stayed* stayed, StaysRecord* record) {
  stayed->record = reinterpret_cast<StaysRecord*>(Py_NewRef(reinterpret_cast<PyObject*>(record)));
  stayed->round = record->round;
  ++record->handles;
  ++record->waiting;
}

// `Backward.passed` where nothing is out of the ordinary; no: Python has to do it.
Answer pass(Stayed* stayed) {
  Lane* const lane = stayed->lane;
  StaysRecord* const record = stayed->record;
  Tape* const tape = record->tape;
  if (!tape->in_backward || tape->prepared != tape->size() || stayed->round > record->round) {
    return Answer::no;
  }
  if (!free_now(lane) || PyObject_Size(lane->to_warn) != 0) {
    return Answer::no;
  }
  const Answer done = nothing_recomputed(lane);
  const Answer good = done == Answer::yes ? nothing_to_look_at(lane, record->kind) : done;
  if (good != Answer::yes) {
    return good;
  }
  if (!tape_advance(tape, record->index)) {
    return Answer::failed;
  }
  --record->waiting;
  stayed->round = record->round + 1;
  const Answer idle = nothing_to_fetch(lane, tape);
  if (idle == Answer::no) {
    const Ref done(PyObject_CallMethodOneArg(stayed->owner, name_fetch_ahead, reinterpret_cast<PyObject*>(tape)));
    return done ? Answer::yes : Answer::failed;
  }
  return idle;
}

bool pass_in_python(Stayed* stayed) {
  const Ref round(PyLong_FromLong(stayed->round));
  PyObject* const arguments[] = {stayed->owner, reinterpret_cast<PyObject*>(stayed->record), round.get()};
  const Ref next(round ? PyObject_VectorcallMethod(name_passed, arguments, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr)
                       : nullptr);
  long long value = 0;
  if (!next || !integer(next, &value)) {
    return false;
  }
  stayed->round = static_cast<long>(value);
  return true;
}

PyObject* stayed_unpack(PyObject* self, PyObject*) {
  Stayed* const stayed = as_stayed(self);
  if (!unchanged(stayed->alias, stayed->version, stayed->record->module)) {
    return nullptr;
  }
  const Answer passed = pass(stayed);
  if (passed == Answer::failed || (passed == Answer::no && !pass_in_python(stayed))) {
    return nullptr;
  }
  return lend(stayed->alias, stayed->record->number, &stayed->lent);
}

// Renews the note of a death, which storages of one size share.
bool share_death(Lane* lane, long long nbytes) {
  if (lane->death != nullptr && PyLong_AsLongLong(lane->death) == nbytes) {
    return true;
  }
  PyObject* const death = PyLong_FromLongLong(nbytes);
  if (death != nullptr) {
    Py_XSETREF(lane->death, death);
  }
  return death != nullptr;
}

// The last handle of a record died: `Storer._release`. Nothing here can run Python but what `record` itself releases.
bool release(Lane* lane, StaysRecord* record) {
  PyObject* const object = reinterpret_cast<PyObject*>(record);
  PyObject* const known_here = PyDict_GetItemWithError(lane->entries, record->key);
  if (!share_death(lane, record->begin - record->end) || known_here == nullptr) {
    if (PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_KeyError, "a record that stays is not known by its storage");
    }
    return false;
  }
  if (known_here == object) {
    if (PyDict_DelItem(lane->entries, record->key) < 0) {
      return false;
    }
  } else if (PyList_Check(known_here)) {  // there are others on this storage; a list may become empty
    for (Py_ssize_t place = PyList_GET_SIZE(known_here) - 1; place >= 0; --place) {
      if (PyList_GET_ITEM(known_here, place) == object && PyList_SetSlice(known_here, place, place + 1, nullptr) < 0) {
        return false;
      }
    }
    if (PyList_GET_SIZE(known_here) == 0 && PyDict_DelItem(lane->entries, record->key) < 0) {
      return false;
    }
  }
  tape_forget(record->tape, record->index);
  record->released = 1;
  record->counted = 0;
  return append_to(lane->notes, lane->death);
}

// `Storer.drop` where nothing is out of the ordinary; no: Python has to do it.
Answer drop(Lane* lane, StaysRecord* record, long round) {
  if (record->handles == 1 && record->tape->live == 1) {
    return Answer::no;  // the order of this tape is learned then, and backward may be over
  }
  if (!free_now(lane) || PyObject_Size(lane->waiters) != 0) {
    return Answer::no;
  }
  --record->handles;
  if (round <= record->round) {
    --record->waiting;
  }
  return record->handles > 0 || release(lane, record) ? Answer::yes : Answer::failed;
}

bool drop_in_python(PyObject* owner, StaysRecord* record, long round) {
  const Ref number(PyLong_FromLong(round));
  PyObject* const arguments[] = {owner, reinterpret_cast<PyObject*>(record), number.get()};
  return number &&
         Ref(PyObject_VectorcallMethod(name_drop, arguments, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

void stayed_dealloc(PyObject* self) {
  Stayed* const stayed = as_stayed(self);
  if (stayed->record != nullptr) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const Answer dropped = drop(stayed->lane, stayed->record, stayed->round);
    if (dropped == Answer::failed || (dropped == Answer::no && !drop_in_python(stayed->owner, stayed->record, stayed->round))) {
      PyErr_WriteUnraisable(reinterpret_cast<PyObject*>(stayed->record));
    }
    if (stayed->record->released) {
      let_go(stayed->record);
    }
    PyErr_Restore(type, value, trace);
    Py_DECREF(reinterpret_cast<PyObject*>(stayed->record));
  }
  Py_DECREF(reinterpret_cast<PyObject*>(stayed->lane));
  Py_DECREF(stayed->owner);
  stayed->alias.~TensorBase();
  PyObject_Free(self);
}

PyObject* stayed_alias(PyObject* self, void*) { return wrap(as_stayed(self)->alias).release(); }

PyObject* stayed_module(PyObject* self, void*) { return Py_NewRef(as_stayed(self)->record->module); }

PyObject* stayed_record(PyObject* self, void*) { return Py_NewRef(reinterpret_cast<PyObject*>(as_stayed(self)->record)); }

PyObject* stayed_owner(PyObject* self, void*) { return Py_NewRef(as_stayed(self)->owner); }

PyMethodDef stayed_methods[] = {
    {"unpack", stayed_unpack, METH_NOARGS, "The saved tensor; raises SavedTensorModifiedError if it was changed."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef stayed_members[] = {{"version", T_LONGLONG, offsetof(Stayed, version), READONLY, "At which it was saved."},
                                {"round", T_LONG, offsetof(Stayed, round), READONLY, "How often it was unpacked."},
                                {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef stayed_getters[] = {{"alias", stayed_alias, nullptr, "Shares memory and version counter.", nullptr},
                                {"module", stayed_module, nullptr, "Where it was saved, if that is known.", nullptr},
                                {"record", stayed_record, nullptr, "Of its storage.", nullptr},
                                {"owner", stayed_owner, nullptr, "The offloader.", nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject stayed_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_stayed() {
  describe(&stayed_type, "actoffload_hooks.Stayed", sizeof(Stayed), Py_TPFLAGS_DISALLOW_INSTANTIATION, stayed_getters,
           "One saved view of a record that stays; backward's way past it is noted.");
  stayed_type.tp_methods = stayed_methods;
  stayed_type.tp_members = stayed_members;
  stayed_type.tp_dealloc = stayed_dealloc;
}

}  // namespace
