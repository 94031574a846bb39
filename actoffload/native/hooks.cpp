// The beginning of pack, and both ends of what stays: `hooks.py` and `handles.py` in C, without a Python frame.
//
// Most of what autograd saves is a parameter or a small tensor and stays where it is. For those `Pack` does all that
// `Offloader._pack` does; for what may move it finds storage and span and calls `Offloader._save`; and for whatever is
// out of the ordinary it calls `Offloader._pack` itself. Only Python's C interface is used, and of PyTorch only what it
// offers to Python, so nothing here depends on PyTorch's binary interface. All of it runs under the GIL, and nothing
// between taking a note and handing out the handle that owns it can be interrupted.

#include "keep.hpp"

namespace {

// -- pack ------------------------------------------------------------------------------------------------------------

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

constexpr std::size_t kMembers[] = {
    offsetof(Pack, owner),    offsetof(Pack, notes), offsetof(Pack, by_number), offsetof(Pack, marked),
    offsetof(Pack, awaited),  offsetof(Pack, least), offsetof(Pack, full),      offsetof(Pack, save),
    offsetof(Pack, settle),   offsetof(Pack, lane),  offsetof(Pack, tape),      offsetof(Pack, last)};
constexpr std::size_t kGiven = std::size(kMembers) - 2;  // all but the last two are arguments

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
  const Answer contiguous = truth(call(tensor, name_is_contiguous));
  if (contiguous != Answer::yes) {
    return contiguous;
  }
  *begin = 0;
  *end = facts.storage_bytes;
  if (facts.nbytes == facts.storage_bytes || 2 * facts.nbytes >= facts.storage_bytes) {
    return Answer::yes;
  }
  long long offset = 0, itemsize = 0;
  if (!integer(call(tensor, name_storage_offset), &offset) || !integer(call(tensor, name_element_size), &itemsize)) {
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
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
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
  const Ref storage = call(tensor, name_untyped_storage);
  if (!storage) {
    return nullptr;
  }
  const Ref number = known.number(storage.get());
  const long long storage_number = number ? PyLong_AsLongLong(number.get()) : -1;
  if (!number || PyErr_Occurred() != nullptr || !integer(known.nbytes(tensor), &facts.nbytes) ||
      !integer(call(storage.get(), name_nbytes), &facts.storage_bytes)) {
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
    *member_of(pack, kMembers[i]) = Py_NewRef(given[i]);
  }
  pack->tape = Py_NewRef(Py_None);
  pack->thread = PyThread_get_thread_ident();
  pack->vectorcall = pack_vectorcall;
  return self.release();
}

int pack_traverse(PyObject* self, visitproc visit, void* arg) {
  for (const std::size_t offset : kMembers) {
    Py_VISIT(*member_of(self, offset));
  }
  return 0;
}

int pack_clear(PyObject* self) {
  for (const std::size_t offset : kMembers) {
    Py_CLEAR(*member_of(self, offset));
  }
  return 0;
}

void pack_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  pack_clear(self);
  Py_TYPE(self)->tp_free(self);
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

// -- the module ------------------------------------------------------------------------------------------------------

// The unpack hook: an object, as PyTorch's compiler looks for an attribute that a function in C cannot have.
struct Unpack {
  PyObject_HEAD
  vectorcallfunc vectorcall;
};

PyObject* unpack_vectorcall(PyObject*, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "unpack takes one handle");
    return nullptr;
  }
  PyObject* const handle = arguments[0];
  const Ref alive(Py_NewRef(handle));  // Python runs meanwhile, and may let the graph go
  if (Py_TYPE(handle) == &kept_type) {
    return kept_unpack(handle, nullptr);
  }
  return Py_TYPE(handle) == &stayed_type ? stayed_unpack(handle, nullptr) : PyObject_CallOneArg(known.unpack, handle);
}

PyObject* unpack_untraced(PyObject*, void*) { return Py_NewRef(Py_True); }

PyGetSetDef unpack_getters[] = {
    {"_torchdynamo_disable", unpack_untraced, nullptr, "The compiler does not look into it.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject unpack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* make_unpack() {
  Unpack* const unpack = PyObject_New(Unpack, &unpack_type);
  if (unpack != nullptr) {
    unpack->vectorcall = unpack_vectorcall;
  }
  return reinterpret_cast<PyObject*>(unpack);
}

PyObject* setup(PyObject*, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"base", "storage",  "tensor", "parameter", "strided",    "regions", "task_id",
                                       "check_version", "unpack", "static", "small", "sequence_number",
                                       "set_version", "resident", "released", "make_lock", "make_deque", "keeps_graph",
                                       "replaced", "own_counter", "many", "record", "span_alignment", nullptr};
  PyObject *base, *storage, *static_name, *small_name;
  Known given = known;
  long long many = 0, record = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOOOOO!OOOUUOOOOOOOOOLLL:setup", const_cast<char**>(kNames), &base, &storage,
                                   &given.tensor, &given.parameter, &given.strided, &PyList_Type, &given.regions, &given.task_id,
                                   &given.check_version, &given.unpack, &static_name, &small_name,
                                   &given.sequence_number, &given.set_version, &given.resident, &given.released,
                                   &given.make_lock, &given.make_deque, &given.keeps_graph, &given.replaced,
                                   &given.own_counter, &many, &record,
                                   &given.span_alignment)) {
    return nullptr;
  }
  if (many != kMany || record != kRecord) {
    PyErr_SetString(PyExc_ValueError, "a burst or a note is not what it was");
    return nullptr;
  }
  const std::pair<Getter*, const char*> getters[] = {
      {&given.layout, "layout"},         {&given.is_nested, "is_nested"}, {&given.is_quantized, "is_quantized"},
      {&given.is_cpu, "is_cpu"},         {&given.is_meta, "is_meta"},     {&given.base, "_base"},          {&given.requires_grad, "requires_grad"},
      {&given.is_leaf, "is_leaf"},       {&given.nbytes, "nbytes"},       {&given.version, "_version"},
      {&given.device, "device"},         {&given.dtype, "dtype"},         {&given.shape, "shape"}};
  for (const auto& [getter, name] : getters) {
    if (!getter->find(base, name)) {
      return nullptr;
    }
  }
  if (!given.number.find(storage, "_cdata")) {
    return nullptr;
  }
  given.static_name = static_name;
  given.small_name = small_name;
  for (PyObject* object : {given.tensor, given.parameter, given.strided, given.regions, given.task_id,
                           given.check_version, given.unpack, given.static_name, given.small_name,
                           given.sequence_number, given.set_version, given.resident, given.released,
                           given.make_lock, given.make_deque, given.keeps_graph, given.replaced,
                           given.own_counter}) {
    Py_INCREF(object);  // for as long as the process lives
  }
  known = given;
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(setup)), METH_VARARGS | METH_KEYWORDS,
     "Tell the module what PyTorch and this library look like. Once, before all else."},
    {"settle", settle, METH_O, "Work off the notes of an `Accounts`."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "actoffload_hooks", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

void describe_types() {
  describe(&kept_type, "actoffload_hooks.Kept", sizeof(Kept), Py_TPFLAGS_DISALLOW_INSTANTIATION, kept_getters,
           "A saved tensor that stays where it is: its alias, and the version at which it was saved.");
  kept_type.tp_dealloc = kept_dealloc;
  kept_type.tp_methods = kept_methods;
  describe(&pack_type, "actoffload_hooks.Pack", sizeof(Pack), Py_TPFLAGS_HAVE_GC, pack_getters,
           "The pack hook of one entry of an offloader's context.");
  make_callable(&pack_type, offsetof(Pack, vectorcall));
  pack_type.tp_new = pack_new;
  pack_type.tp_dealloc = pack_dealloc;
  pack_type.tp_traverse = pack_traverse;
  pack_type.tp_clear = pack_clear;
  pack_type.tp_free = PyObject_GC_Del;
  describe(&unpack_type, "actoffload_hooks.Unpack", sizeof(Unpack), Py_TPFLAGS_DISALLOW_INSTANTIATION, unpack_getters,
           "The tensor that a handle stands for.");
  make_callable(&unpack_type, offsetof(Unpack, vectorcall));
  describe_lock();
  describe_tape();
  describe_lane();
  describe_record();
  describe_stayed();
}

}  // namespace

PyMODINIT_FUNC PyInit_actoffload_hooks() {
  describe_types();
  PyTypeObject* const types[] = {&kept_type, &pack_type, &lock_type, &tape_type, &lane_type, &record_type, &stayed_type, &unpack_type};
  if (!intern_names()) {
    return nullptr;
  }
  Ref made(PyModule_Create(&module));
  for (PyTypeObject* const type : types) {
    if (!made || PyType_Ready(type) < 0 ||
        (type != &unpack_type && PyModule_AddType(made.get(), type) < 0)) {
      return nullptr;
    }
  }
  Ref unpack(make_unpack());
  if (!unpack || PyModule_AddObjectRef(made.get(), "unpack", unpack.get()) < 0) {
    return nullptr;
  }
  return made.release();
}
