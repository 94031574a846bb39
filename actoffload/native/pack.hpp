// The pack hook: what `Packer._pack` does for plain tensors.
//
// A parameter or a small tensor is kept here, and so is what a plan keeps; for what may move storage and span are found and
// `Packer._save` is called; and for whatever is out of the ordinary `Packer._pack` itself.

#pragma once

#include "move.hpp"

namespace {

struct Pack {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* owner;      // the Offloader
  PyObject* notes;      // Accounts.notes
  PyObject* by_number;  // of the storages that are known: parameters, buffers, inputs
  PyObject* marked;     // those with keep()
  PyObject* awaited;    // modules with sharded parameters that were never seen gathered
  PyObject* least;      // bytes by type of device
  PyObject* full;    // Offloader._pack
  PyObject* save;    // Offloader._save
  PyObject* settle;  // works the notes off
  PyObject *last_static, *last_small;  // the notes that were taken last: tensors of one size share them
  PyObject* lane;    // a Lane
  PyObject* tape;    // of the forward that runs in `thread`, where this hook was entered; or None
  Py_ssize_t many;
  unsigned long thread;
};

constexpr std::size_t kPackMembers[] = {
    offsetof(Pack, owner),    offsetof(Pack, notes), offsetof(Pack, by_number), offsetof(Pack, marked),
    offsetof(Pack, awaited),  offsetof(Pack, least), offsetof(Pack, full),      offsetof(Pack, save),
    offsetof(Pack, settle),   offsetof(Pack, lane),  offsetof(Pack, tape),      offsetof(Pack, last_static), offsetof(Pack, last_small)};
constexpr std::size_t kGiven = std::size(kPackMembers) - 3;  // all but the last three are arguments

// What is known of a tensor before anything is decided.
struct Facts {
  long long nbytes = 0, storage_bytes = 0;
  bool leaf = true, parameter = false, is_view = false;
};

// `is_parameter` of identity.py. No where its base is of another type, or failed with an error.
Answer is_parameter(PyObject* object, const at::TensorBase& tensor, Facts* facts) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const bool says_parameter = reinterpret_cast<PyObject*>(Py_TYPE(object)) == known.parameter;
  if (impl->autograd_meta() == nullptr) {  // no gradient is wanted, and it is a leaf and no view
    facts->parameter = says_parameter;
    return Answer::yes;
  }
  facts->leaf = tensor.is_leaf();
  facts->is_view = tensor.is_view();
  const bool wanted = facts->leaf && impl->requires_grad();
  if (!facts->is_view) {
    facts->parameter = wanted || says_parameter;
    return Answer::yes;
  }
  const Ref base = known.base(object);
  if (!base) {
    return Answer::failed;
  }
  const at::TensorBase* const origin = plain_tensor(base.get());
  if (origin == nullptr) {
    return Answer::no;
  }
  facts->parameter = reinterpret_cast<PyObject*>(Py_TYPE(base.get())) == known.parameter ||
                     (origin->is_leaf() && (origin->unsafeGetTensorImpl()->requires_grad() || wanted));
  return Answer::yes;
}

// Whether a dictionary has a key; a key that is a number runs no Python.
Answer has(PyObject* dictionary, PyObject* key) {
  const int found = PyDict_Contains(dictionary, key);
  return found < 0 ? Answer::failed : found != 0 ? Answer::yes : Answer::no;
}

// Whether something beyond parameters and sizes decides: a note, a mark, a region, a recomputation.
Answer special(const Pack* pack, PyObject* number) {
  if (PyDict_GET_SIZE(pack->awaited) != 0) {
    return Answer::yes;
  }
  for (PyObject* dictionary : {pack->by_number, pack->marked}) {
    const Answer found = has(dictionary, number);
    if (found != Answer::no) {
      return found;
    }
  }
  if (PyList_GET_SIZE(known.regions) != 0) {  // of any thread: Python looks whose
    return Answer::yes;
  }
  return torch::autograd::get_current_graph_task_id() != -1 ? Answer::yes : Answer::no;
}

// The bytes of the storage that a view with elements needs: `byte_span` of identity.py.
void span(const c10::TensorImpl* impl, long long storage_bytes, long long* begin, long long* end) {
  const long long itemsize = static_cast<long long>(impl->itemsize());
  *begin = impl->storage_offset() * itemsize;
  *end = *begin + reach_of(impl) * itemsize;
  if (2 * (*end - *begin) >= storage_bytes) {
    *begin = 0;
    *end = storage_bytes;
    return;
  }
  *begin -= *begin % known.span_alignment;
  *end = (*end + known.span_alignment - 1) / known.span_alignment * known.span_alignment;
  *end = *end < storage_bytes ? *end : storage_bytes;
}

// The type of a tensor's device, such as "cpu".
Ref device_type(PyObject* object, bool cpu) {
  if (cpu) {
    return Ref(Py_NewRef(name_cpu));
  }
  const Ref device = known.device(object);
  return Ref(device ? PyObject_GetAttr(device.get(), name_type) : nullptr);
}

// The smallest tensor that moves from a type of device; no if nothing moves from there.
Answer least(const Pack* pack, const Ref& kind, long long* nbytes) {
  if (!kind) {
    return Answer::failed;
  }
  PyObject* const found = PyDict_GetItemWithError(pack->least, kind.get());
  if (found == nullptr) {
    return PyErr_Occurred() != nullptr ? Answer::failed : Answer::no;
  }
  *nbytes = PyLong_AsLongLong(found);
  return *nbytes == -1 && PyErr_Occurred() != nullptr ? Answer::failed : Answer::yes;
}

bool settle_many(Pack* pack) {
  const Py_ssize_t notes = PyObject_Size(pack->notes);
  if (notes < pack->many) {
    return notes >= 0;
  }
  const Ref done(PyObject_CallNoArgs(pack->settle));
  return static_cast<bool>(done);
}

// Renews a note that tensors of one size share.
bool share_note(PyObject** last, PyObject* reason, long long nbytes, PyObject* activation) {
  if (*last != nullptr && PyLong_AsLongLong(PyTuple_GET_ITEM(*last, 1)) == nbytes) {
    return true;
  }
  PyObject* const note = Py_BuildValue("(OLO)", reason, nbytes, activation);
  if (note != nullptr) {
    Py_XSETREF(*last, note);
  }
  return note != nullptr;
}

Ref keep_alias(PyObject* object, const at::TensorBase& tensor) {
  at::TensorBase alias;
  return make_alias(object, tensor, &alias) ? make_kept(std::move(alias), number_of_storage(storage_of(tensor))) : Ref();
}

PyObject* keep_parameter(Pack* pack, PyObject* object, const at::TensorBase& tensor, const Facts& facts) {
  // A leaf itself, as autograd does: it makes no cycle, and its `.data` may be swapped.
  Ref kept = facts.leaf ? make_kept(tensor, 0) : keep_alias(object, tensor);
  const long long nbytes = facts.nbytes < facts.storage_bytes ? facts.nbytes : facts.storage_bytes;
  if (!kept || !share_note(&pack->last_static, known.static_name, nbytes, Py_False) ||
      !append_to(pack->notes, pack->last_static) || !settle_many(pack)) {
    return nullptr;
  }
  return kept.release();
}

PyObject* keep_small(Pack* pack, PyObject* object, const at::TensorBase& tensor, long long nbytes) {
  Ref kept = keep_alias(object, tensor);
  if (!kept || !share_note(&pack->last_small, known.small_name, nbytes, Py_True) ||
      !append_to(pack->notes, pack->last_small)) {
    return nullptr;
  }
  Kept* const activation = as_kept(kept.get());  // from here on its death is noted
  activation->nbytes = Py_NewRef(PyTuple_GET_ITEM(pack->last_small, 1));
  activation->notes = Py_NewRef(pack->notes);
  return settle_many(pack) ? kept.release() : nullptr;
}

// Whether an activation that stays is only counted: nothing is recorded, and no room has to be made.
bool only_counted(const Pack* pack) {
  const Lane* const lane = reinterpret_cast<Lane*>(pack->lane);
  return !lane->bounded && PyList_GET_SIZE(lane->recording) == 0;
}

// The handle of a tensor that is large enough to move.
PyObject* save(Pack* pack, const Wanted& wanted) {
  if (pack->tape != Py_None && pack->thread == PyThread_get_thread_ident()) {
    Lane* const lane = reinterpret_cast<Lane*>(pack->lane);
    const Ref tape(Py_NewRef(pack->tape));  // what runs meanwhile may put another one there
    Ref kept(keep_planned(lane, as_tape(tape.get()), wanted));
    if (kept) {
      return settle_many(pack) ? kept.release() : nullptr;
    }
    if (PyErr_Occurred() == nullptr) {
      kept = Ref(move(lane, as_tape(tape.get()), wanted));
    }
    if (kept || PyErr_Occurred() != nullptr) {
      return kept.release();
    }
  }
  const Ref storage = wrap(wanted.tensor.unsafeGetTensorImpl()->unsafe_storage());
  const Ref begin(PyLong_FromLongLong(wanted.begin)), end(PyLong_FromLongLong(wanted.end));
  if (!storage || !begin || !end) {
    return nullptr;
  }
  PyObject* const arguments[] = {wanted.object, storage.get(), begin.get(), end.get()};
  return PyObject_Vectorcall(pack->save, arguments, 4, nullptr);
}

// The handle of a plain tensor; null without an error where Python has to look at it.
PyObject* pack_plain(Pack* pack, PyObject* object, const at::TensorBase& tensor) {
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  Facts facts;
  facts.nbytes = impl->numel() * static_cast<long long>(impl->itemsize());
  if (is_parameter(object, tensor, &facts) != Answer::yes ||
      !guarded([&] { facts.storage_bytes = static_cast<long long>(storage_of(tensor)->nbytes()); })) {
    return nullptr;
  }
  const Ref number(PyLong_FromLongLong(number_of_storage(storage_of(tensor))));
  if (!number) {
    return nullptr;
  }
  if (facts.parameter) {
    return has(pack->by_number, number.get()) == Answer::yes ? keep_parameter(pack, object, tensor, facts) : nullptr;
  }
  long long begin = 0, end = 0, smallest = 0;
  if (facts.nbytes == 0 || special(pack, number.get()) != Answer::no) {
    return nullptr;
  }
  span(impl, facts.storage_bytes, &begin, &end);
  const bool cpu = impl->is_cpu();
  const Ref kind = device_type(object, cpu);
  if (least(pack, kind, &smallest) != Answer::yes) {
    return nullptr;
  }
  if (end - begin < smallest) {
    return only_counted(pack) ? keep_small(pack, object, tensor, end - begin) : nullptr;
  }
  return save(pack, Wanted{pack->owner, object, tensor, number.get(), kind.get(), begin, end, facts.is_view, cpu});
}

PyObject* pack_vectorcall(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "pack takes one tensor");
    return nullptr;
  }
  Pack* const pack = reinterpret_cast<Pack*>(self);
  if (pack->full == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the offloader of this hook is being collected");
    return nullptr;
  }
  const at::TensorBase* const tensor = plain_tensor(arguments[0]);
  PyObject* const packed = tensor != nullptr ? pack_plain(pack, arguments[0], *tensor) : nullptr;
  if (packed != nullptr || PyErr_Occurred() != nullptr) {
    return packed;
  }
  return PyObject_CallOneArg(pack->full, arguments[0]);
}

PyObject* pack_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"owner", "notes", "by_number", "marked", "awaited", "least", "full",
                                       "save",  "settle", "lane", "many",  nullptr};
  Ref self(type->tp_alloc(type, 0));  // all members are null
  if (!self) {
    return nullptr;
  }
  Pack* const pack = reinterpret_cast<Pack*>(self.get());
  PyObject* given[kGiven];
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOO!O!O!O!OOOO!n:Pack", const_cast<char**>(kNames), &given[0],
                                   &given[1], &PyDict_Type, &given[2], &PyDict_Type, &given[3], &PyDict_Type, &given[4],
                                   &PyDict_Type, &given[5], &given[6], &given[7], &given[8], &lane_type, &given[9],
                                   &pack->many)) {
    return nullptr;
  }
  for (std::size_t i = 0; i < kGiven; ++i) {
    *member_of(pack, kPackMembers[i]) = Py_NewRef(given[i]);
  }
  pack->tape = Py_NewRef(Py_None);
  pack->thread = PyThread_get_thread_ident();
  pack->vectorcall = pack_vectorcall;
  return self.release();
}

PyObject* pack_self(PyObject* self, void*) {
  PyObject* const owner = reinterpret_cast<Pack*>(self)->owner;
  return Py_NewRef(owner != nullptr ? owner : Py_None);
}

PyObject* pack_tape(PyObject* self, void*) {
  PyObject* const tape = reinterpret_cast<Pack*>(self)->tape;
  return Py_NewRef(tape != nullptr ? tape : Py_None);
}

int pack_set_tape(PyObject* self, PyObject* tape, void*) {
  if (tape == nullptr || (tape != Py_None && Py_TYPE(tape) != &tape_type)) {
    PyErr_SetString(PyExc_TypeError, "tape: give a Tape of this module, or None");
    return -1;
  }
  Py_XSETREF(reinterpret_cast<Pack*>(self)->tape, Py_NewRef(tape));
  return 0;
}

PyGetSetDef pack_getters[] = {{"__self__", pack_self, nullptr, "The offloader, as of a bound method.", nullptr},
                              {"tape", pack_tape, pack_set_tape, "Of the forward that runs in its thread.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_pack() {
  describe(&pack_type, "actoffload_hooks.Pack", sizeof(Pack), 0, pack_getters,
           "The pack hook of one entry of an offloader's context.");
  make_callable(&pack_type, offsetof(Pack, vectorcall));
  make_collected(&pack_type, pack_new, dealloc_members<kPackMembers>, traverse_members<kPackMembers>,
                 clear_members<kPackMembers>);
}

}  // namespace
