"""Bazel 4.2 only: a virtual environment as a Python toolchain, with the headers of Python and nanobind."""

load("//:xla_ffi/repositories.bzl", "ask_python", "environment_python")

def _local_python(ctx):
    ctx.symlink(ask_python(ctx, "import sysconfig; print(sysconfig.get_path('include'))"), "include")
    ctx.symlink(ask_python(ctx, "import nanobind, os; print(os.path.dirname(nanobind.__file__))"), "nanobind")

    # -S: no .pth file of the environment is run. That of an editable install of jax_fp4 would answer
    # `import jax_fp4` before anything that Bazel built.
    packages = ask_python(ctx, "import sysconfig; print(sysconfig.get_path('purelib'))")
    ctx.file(
        "python3",
        "#!/bin/sh\nPYTHONPATH=\"$PYTHONPATH:%s\" exec '%s' -S \"$@\"\n" % (packages, environment_python(ctx)),
        executable = True,
    )
    ctx.file("BUILD.bazel", """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")
load("@rules_cc//cc:defs.bzl", "cc_library")

py_runtime(
    name = "runtime",
    interpreter_path = "%s",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h", "include/**/*.h"]),
    copts = [
        "-std=c++17",
        "-fno-strict-aliasing",
        "-fvisibility=hidden",
        "-ffunction-sections",
        "-fdata-sections",
        "-Os",
        "-w",
    ],
    includes = ["include", "nanobind/include"],
    local_defines = ["NB_BUILD"],
    textual_hdrs = glob(["nanobind/src/*", "nanobind/ext/**/*.h"]),
    deps = [":robin_map"],
    visibility = ["//visibility:public"],
)

cc_library(
    name = "robin_map",
    hdrs = glob(["nanobind/ext/robin_map/include/**/*.h"]),
    includes = ["nanobind/ext/robin_map/include"],
)
""" % ctx.path("python3"))

local_python = repository_rule(
    implementation = _local_python,
    environ = ["JAX_FP4_PYTHON", "PATH"],
    doc = "@NAME//:toolchain and @NAME//:nanobind of the virtual environment.",
    local = True,
)
