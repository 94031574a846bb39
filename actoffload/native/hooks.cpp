// The hooks in C, without a frame of Python where a tensor stays, and the parts of the offloader that they need: the module.
//
// Only Python's C interface is used, and of PyTorch only what it offers to Python, so nothing here depends on PyTorch's
// binary interface. All of it runs under the GIL, and nothing between taking a note and handing out the handle that owns it
// can be interrupted.

#include "moving.hpp"
#include "pack.hpp"
#include "tape_type.hpp"

namespace {

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
    {"notice_resized", notice_resized, METH_VARARGS, "notice_resized(turn, most, moving): look at what is being copied."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "actoffload_hooks", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

void describe_types() {
  describe(&kept_type, "actoffload_hooks.Kept", sizeof(Kept), Py_TPFLAGS_DISALLOW_INSTANTIATION, kept_getters,
           "A saved tensor that stays where it is: its alias, and the version at which it was saved.");
  kept_type.tp_dealloc = kept_dealloc;
  kept_type.tp_methods = kept_methods;
  describe(&unpack_type, "actoffload_hooks.Unpack", sizeof(Unpack), Py_TPFLAGS_DISALLOW_INSTANTIATION, unpack_getters,
           "The tensor that a handle stands for.");
  make_callable(&unpack_type, offsetof(Unpack, vectorcall));
  describe_lock();
  describe_tape();
  describe_lane();
  describe_record();
  describe_stayed();
  describe_pack();
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
