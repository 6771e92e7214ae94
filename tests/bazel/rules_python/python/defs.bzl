"""rules_python for Bazel 4.2, which has these rules inside."""

py_library = native.py_library
py_test = native.py_test
