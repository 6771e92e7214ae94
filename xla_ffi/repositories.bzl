"""What the build takes from this machine: XLA's FFI headers, from jaxlib; the CUDA toolkit, where it is asked for."""

def environment_python(ctx):
    """The Python of the environment that has jax, as a string: JAX_FP4_PYTHON, or the python3 on PATH."""
    found = ctx.os.environ.get("JAX_FP4_PYTHON") or ctx.which("python3")
    if not found:
        fail("jax_fp4: there is no python3 on PATH. Activate an environment that has jax, or name its Python: " +
             "--repo_env=JAX_FP4_PYTHON=/path/to/python")
    return str(found)

def ask_python(ctx, code):
    """What that Python prints when it runs `code`."""
    python = environment_python(ctx)
    result = ctx.execute([python, "-c", code])
    if result.return_code:
        fail(("jax_fp4: %s cannot say `%s`:\n%s\nActivate an environment with the build requirements of pyproject.toml, " +
              "or name its Python: --repo_env=JAX_FP4_PYTHON=/path/to/python") % (python, code, result.stderr))
    return result.stdout.strip()

def _ffi_headers(ctx):
    include = ask_python(ctx, "import jax.ffi; print(jax.ffi.include_dir())")
    ctx.symlink(include, "include")
    ctx.file("BUILD.bazel", """\
load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""")

# A handler built with newer headers is refused by an older runtime: build beside the oldest supported jaxlib.
ffi_headers = repository_rule(
    implementation = _ffi_headers,
    environ = ["JAX_FP4_PYTHON", "PATH"],
    doc = "@NAME//:ffi, the headers xla/ffi/api/*.h of the jaxlib in the environment.",
    local = True,
)

def _cuda_toolkit(ctx):
    nvcc = ctx.which(ctx.os.environ.get("CUDACXX") or "nvcc")
    if not nvcc:
        fail("jax_fp4: the CUDA targets need nvcc, and there is none. Put that of a CUDA toolkit (tested: 13.0) on PATH, " +
             "or name it: --repo_env=CUDACXX=/path/to/nvcc")

    # nvcc looks for its parts beside itself, and may be a link or a script: it says itself where they are.
    dry = ctx.execute([nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null"])
    top = [line[len("#$ TOP="):].strip() for line in dry.stderr.splitlines() if line.startswith("#$ TOP=")]
    if len(top) != 1:
        fail("jax_fp4: `%s --dryrun` does not say where its toolkit is:\n%s" % (nvcc, dry.stderr))
    found = [
        top[0] + "/" + folder
        for folder in ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"]
        if ctx.path(top[0] + "/" + folder + "/libcudart_static.a").exists
    ]
    if not found:
        fail("jax_fp4: the CUDA toolkit %s has no libcudart_static.a" % top[0])
    ctx.symlink(top[0] + "/include", "include")
    ctx.symlink(found[0] + "/libcudart_static.a", "libcudart_static.a")
    ctx.file("nvcc", "#!/bin/sh\nexec '%s' \"$@\"\n" % nvcc, executable = True)
    ctx.file("BUILD.bazel", """\
load("@rules_cc//cc:defs.bzl", "cc_library")

exports_files(["nvcc"])

cc_library(
    name = "cudart_static",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/**"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    visibility = ["//visibility:public"],
)
""")

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit,
    environ = ["CUDACXX", "PATH"],
    doc = "@NAME//:nvcc and @NAME//:cudart_static of the toolkit of CUDACXX, or of the nvcc on PATH.",
    local = True,
)
