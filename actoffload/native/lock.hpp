// `DrainingLock` of locks.py. With no frame of Python between taking it and the block that it guards, nor between the
// block and giving it back, an interrupt cannot leave it taken; and who only looks at it makes no call.

#pragma once

#include <structmember.h>

#include "known.hpp"

namespace {

struct Lock {
  PyObject_HEAD
  PyObject* inner;          // a threading.Lock
  PyObject* noted;          // a deque: what was noted and not worked off
  PyObject* after_release;  // a weakref.WeakMethod, or None
  char held;
};

constexpr std::size_t kLockMembers[] = {offsetof(Lock, inner), offsetof(Lock, noted), offsetof(Lock, after_release)};

extern PyTypeObject lock_type;

Lock* as_lock(PyObject* object) { return reinterpret_cast<Lock*>(object); }

PyObject* lock_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"after_release", "noted", nullptr};
  PyObject *after = Py_None, *noted = Py_None;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "|OO:DrainingLock", const_cast<char**>(kNames), &after, &noted)) {
    return nullptr;
  }
  Ref self(type->tp_alloc(type, 0));
  if (!self) {
    return nullptr;
  }
  Lock* const lock = as_lock(self.get());
  lock->inner = PyObject_CallNoArgs(known.make_lock);
  lock->noted = noted == Py_None ? PyObject_CallNoArgs(known.make_deque) : Py_NewRef(noted);
  lock->after_release = Py_NewRef(after);
  return lock->inner != nullptr && lock->noted != nullptr ? self.release() : nullptr;
}

PyObject* lock_acquire(PyObject* self, PyObject* arguments, PyObject* names) {
  Ref method(PyObject_GetAttr(as_lock(self)->inner, name_acquire));
  Ref taken(method ? PyObject_Call(method.get(), arguments, names) : nullptr);
  if (taken && taken.get() == Py_True) {
    as_lock(self)->held = 1;
  }
  return taken.release();
}

PyObject* lock_enter(PyObject* self, PyObject*) {
  Ref taken = call(as_lock(self)->inner, name_acquire);
  if (taken) {
    as_lock(self)->held = 1;
  }
  return taken.release();
}

PyObject* lock_release_only(PyObject* self, PyObject*) {
  Lock* const lock = as_lock(self);
  const bool was_held = lock->held;
  lock->held = 0;
  Ref done = call(lock->inner, name_release);
  if (!done) {
    lock->held = was_held;
  }
  return done.release();
}

// run_if_free(work): what `work` returns, with the lock held meanwhile; None where somebody else holds it.
PyObject* lock_run_if_free(PyObject* self, PyObject* work) {
  const Ref alive(Py_NewRef(self));
  PyObject* const arguments[] = {as_lock(self)->inner, Py_False};
  const Ref taken(PyObject_VectorcallMethod(name_acquire, arguments, 2, nullptr));
  if (!taken || taken.get() != Py_True) {
    return taken ? Py_NewRef(Py_None) : nullptr;
  }
  as_lock(self)->held = 1;
  Ref result(PyObject_CallNoArgs(work));
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const Ref given_back(lock_release_only(self, nullptr));
  if (given_back) {
    PyErr_Restore(type, value, trace);
    return result.release();
  }
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return nullptr;
}

PyObject* lock_release(PyObject* self, PyObject*) {
  Lock* const lock = as_lock(self);
  const Ref alive(Py_NewRef(self));
  if (!Ref(lock_release_only(self, nullptr))) {
    return nullptr;
  }
  const Py_ssize_t noted = PyObject_Size(lock->noted);
  if (noted == 0 || lock->after_release == nullptr || lock->after_release == Py_None) {
    return Py_NewRef(Py_None);
  }
  const Ref after(noted < 0 ? nullptr : PyObject_CallNoArgs(lock->after_release));
  if (!after) {
    return nullptr;
  }
  if (after.get() != Py_None && !Ref(PyObject_CallNoArgs(after.get()))) {
    return nullptr;
  }
  return Py_NewRef(Py_None);
}

PyObject* lock_exit(PyObject* self, PyObject* const*, Py_ssize_t) { return lock_release(self, nullptr); }

PyObject* lock_acquire_restore(PyObject* self, PyObject*) { return lock_enter(self, nullptr); }

PyObject* lock_locked(PyObject* self, PyObject*) { return call(as_lock(self)->inner, name_locked).release(); }

PyMethodDef lock_methods[] = {
    {"acquire", as_method(lock_acquire), METH_VARARGS | METH_KEYWORDS, "As `threading.Lock.acquire`."},
    {"release", lock_release, METH_NOARGS, "Give it back, and let the owner work off what was noted meanwhile."},
    {"run_if_free", lock_run_if_free, METH_O, "Have something done with the lock held, unless somebody holds it."},
    {"release_only", lock_release_only, METH_NOARGS, "Give it back without the call: for the owner's own work."},
    {"_release_save", lock_release_only, METH_NOARGS, "What `threading.Condition` asks of a lock."},
    {"_acquire_restore", lock_acquire_restore, METH_O, "What `threading.Condition` asks of a lock."},
    {"_is_owned", lock_locked, METH_NOARGS, "What `threading.Condition` asks of a lock."},
    {"locked", lock_locked, METH_NOARGS, "Whether somebody holds it."},
    {"__enter__", lock_enter, METH_NOARGS, "As `acquire`."},
    {"__exit__", as_method(lock_exit), METH_FASTCALL, "As `release`."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef lock_members[] = {{"noted", T_OBJECT, offsetof(Lock, noted), READONLY, "What was noted and not worked off."},
                              {"after_release", T_OBJECT, offsetof(Lock, after_release), 0, "Called where some was."},
                              {nullptr, 0, 0, 0, nullptr}};

PyTypeObject lock_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_lock() {
  describe(&lock_type, "actoffload_hooks.DrainingLock", sizeof(Lock), 0, nullptr,
           "A mutex that calls its owner back when it was released and something is noted.");
  lock_type.tp_methods = lock_methods;
  lock_type.tp_members = lock_members;
  make_collected(&lock_type, lock_new, dealloc_members<kLockMembers>, traverse_members<kLockMembers>,
                 clear_members<kLockMembers>);
}

}  // namespace
