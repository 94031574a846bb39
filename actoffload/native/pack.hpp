// The pack hook: what `Packer._pack` does for tensors of the ordinary kind.
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
  PyObject* last;    // the note that was taken last: tensors of one size share it
  PyObject* lane;    // a Lane
  PyObject* tape;    // of the forward that runs in `thread`, where this hook was entered; or None
  long long last_nbytes;
  Py_ssize_t many;
  unsigned long thread;
};

constexpr std::size_t kPackMembers[] = {
    offsetof(Pack, owner),    offsetof(Pack, notes), offsetof(Pack, by_number), offsetof(Pack, marked),
    offsetof(Pack, awaited),  offsetof(Pack, least), offsetof(Pack, full),      offsetof(Pack, save),
    offsetof(Pack, settle),   offsetof(Pack, lane),  offsetof(Pack, tape),      offsetof(Pack, last)};
constexpr std::size_t kGiven = std::size(kPackMembers) - 2;  // all but the last two are arguments

// What is known of a tensor before anything is decided.
struct Facts {
  long long nbytes = 0, storage_bytes = 0;
  bool cpu = false, leaf = false, parameter = false, is_view = false;
};

// Whether a tensor is of the ordinary kind, for which alone the rest is written.
Answer ordinary(PyObject* tensor, Facts* facts) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type != known.tensor && type != known.parameter) {
    return Answer::no;
  }
  const Ref layout = known.layout(tensor);
  if (!layout) {
    return Answer::failed;
  }
  if (layout.get() != known.strided) {
    return Answer::no;
  }
  for (const Getter* getter : {&known.is_nested, &known.is_quantized}) {
    const Answer odd = truth((*getter)(tensor));
    if (odd != Answer::no) {
      return odd == Answer::failed ? odd : Answer::no;
    }
  }
  const Answer cpu = truth(known.is_cpu(tensor));
  if (cpu != Answer::no) {
    facts->cpu = true;
    return cpu;
  }
  const Answer meta = truth(known.is_meta(tensor));
  return meta == Answer::failed ? meta : meta == Answer::yes ? Answer::no : Answer::yes;
}

// `is_parameter` of identity.py; no where its base is of another type, failed with an error set or without.
Answer look(PyObject* tensor, Facts* facts) {
  const Ref base = known.base(tensor);
  const Answer wanted = base ? truth(known.requires_grad(tensor)) : Answer::failed;
  const Answer leaf = wanted != Answer::failed ? truth(known.is_leaf(tensor)) : Answer::failed;
  if (leaf == Answer::failed) {
    return Answer::failed;
  }
  facts->leaf = leaf == Answer::yes;
  facts->is_view = base.get() != Py_None;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (base.get() == Py_None) {
    facts->parameter = (wanted == Answer::yes && facts->leaf) || type == known.parameter;
    return Answer::yes;
  }
  PyObject* const base_type = reinterpret_cast<PyObject*>(Py_TYPE(base.get()));
  if (base_type != known.tensor && base_type != known.parameter) {
    return Answer::no;
  }
  const Answer base_leaf = truth(known.is_leaf(base.get()));
  const Answer base_wanted = base_leaf != Answer::failed ? truth(known.requires_grad(base.get())) : Answer::failed;
  if (base_wanted == Answer::failed) {
    return Answer::failed;
  }
  facts->parameter = base_type == known.parameter ||
                     (base_leaf == Answer::yes &&
                      (base_wanted == Answer::yes || (wanted == Answer::yes && facts->leaf)));
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
  long long task = 0;
  if (!integer(Ref(PyObject_CallNoArgs(known.task_id)), &task)) {
    return Answer::failed;
  }
  return task != -1 ? Answer::yes : Answer::no;
}

// The bytes of the storage that a contiguous view stands for: `byte_span` of identity.py. No if it is not contiguous.
Answer span(PyObject* tensor, const Facts& facts, long long* begin, long long* end) {
  const Answer contiguous = truth(known.is_contiguous(tensor));
  if (contiguous != Answer::yes) {
    return contiguous;
  }
  *begin = 0;
  *end = facts.storage_bytes;
  if (facts.nbytes == facts.storage_bytes || 2 * facts.nbytes >= facts.storage_bytes) {
    return Answer::yes;
  }
  long long offset = 0, itemsize = 0;
  if (!integer(known.storage_offset(tensor), &offset) || !integer(known.element_size(tensor), &itemsize)) {
    return Answer::failed;
  }
  *begin = offset * itemsize;
  *end = *begin + facts.nbytes;
  *begin -= *begin % known.span_alignment;
  *end = (*end + known.span_alignment - 1) / known.span_alignment * known.span_alignment;
  if (*end > facts.storage_bytes) {
    *end = facts.storage_bytes;
  }
  return Answer::yes;
}

// The type of a tensor's device, such as "cpu".
Ref device_type(PyObject* tensor, const Facts& facts) {
  if (facts.cpu) {
    return Ref(Py_NewRef(name_cpu));
  }
  const Ref device = known.device(tensor);
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

// Takes a note; many of them are worked off at once.
bool note(Pack* pack, PyObject* taken) {
  const Ref done(PyObject_CallMethodOneArg(pack->notes, name_append, taken));
  return static_cast<bool>(done);
}

bool settle_many(Pack* pack) {
  const Py_ssize_t notes = PyObject_Size(pack->notes);
  if (notes < pack->many) {
    return notes >= 0;
  }
  const Ref done(PyObject_CallNoArgs(pack->settle));
  return static_cast<bool>(done);
}

PyObject* keep_parameter(Pack* pack, PyObject* tensor, const Facts& facts, long long number) {
  // A leaf itself, as autograd does: it makes no cycle, and its `.data` may be swapped.
  Ref kept(facts.leaf ? make_kept(Ref(Py_NewRef(tensor)), 0) : make_kept(hidden_alias(tensor), number));
  if (!kept) {
    return nullptr;
  }
  const long long nbytes = facts.nbytes < facts.storage_bytes ? facts.nbytes : facts.storage_bytes;
  const Ref taken(Py_BuildValue("(OLO)", known.static_name, nbytes, Py_False));
  if (!taken || !note(pack, taken.get()) || !settle_many(pack)) {
    return nullptr;
  }
  return kept.release();
}

PyObject* keep_small(Pack* pack, PyObject* tensor, long long nbytes, long long number) {
  Ref kept(make_kept(hidden_alias(tensor), number));
  if (!kept) {
    return nullptr;
  }
  if (pack->last == nullptr || pack->last_nbytes != nbytes) {
    PyObject* const taken = Py_BuildValue("(OLO)", known.small_name, nbytes, Py_True);
    if (taken == nullptr) {
      return nullptr;
    }
    Py_XSETREF(pack->last, taken);
    pack->last_nbytes = nbytes;
  }
  if (!note(pack, pack->last)) {
    return nullptr;
  }
  Kept* const activation = reinterpret_cast<Kept*>(kept.get());  // from here on its death is noted
  activation->nbytes = Py_NewRef(PyTuple_GET_ITEM(pack->last, 1));
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
  const Ref begin(PyLong_FromLongLong(wanted.begin)), end(PyLong_FromLongLong(wanted.end));
  if (!begin || !end) {
    return nullptr;
  }
  PyObject* const arguments[] = {wanted.tensor, wanted.storage, begin.get(), end.get()};
  return PyObject_Vectorcall(pack->save, arguments, 4, nullptr);
}

// The handle of a tensor of the ordinary kind; null without an error where Python has to look at it.
PyObject* pack_ordinary(Pack* pack, PyObject* tensor) {
  Facts facts;
  if (ordinary(tensor, &facts) != Answer::yes || look(tensor, &facts) != Answer::yes) {
    return nullptr;
  }
  const Ref storage = known.untyped_storage(tensor);
  if (!storage) {
    return nullptr;
  }
  const Ref number = known.number(storage.get());
  const long long storage_number = number ? PyLong_AsLongLong(number.get()) : -1;
  if (!number || PyErr_Occurred() != nullptr || !integer(known.nbytes(tensor), &facts.nbytes) ||
      !integer(known.storage_bytes(storage.get()), &facts.storage_bytes)) {
    return nullptr;
  }
  if (facts.parameter) {
    return has(pack->by_number, number.get()) == Answer::yes ? keep_parameter(pack, tensor, facts, storage_number) : nullptr;
  }
  long long begin = 0, end = 0, smallest = 0;
  if (facts.nbytes == 0 || special(pack, number.get()) != Answer::no ||
      span(tensor, facts, &begin, &end) != Answer::yes) {
    return nullptr;
  }
  const Ref kind = device_type(tensor, facts);
  if (least(pack, kind, &smallest) != Answer::yes) {
    return nullptr;
  }
  if (end - begin < smallest) {
    return only_counted(pack) ? keep_small(pack, tensor, end - begin, storage_number) : nullptr;
  }
  const Wanted wanted{pack->owner, tensor, storage.get(), number.get(), kind.get(), storage_number, begin, end, facts.is_view};
  return save(pack, wanted);
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
  PyObject* const packed = pack_ordinary(pack, arguments[0]);
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
