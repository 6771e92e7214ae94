"""nanobind_bazel, which needs Bazel 7, for 4.2: the one rule that jax_fp4 uses."""

load("@rules_cc//cc:defs.bzl", "cc_binary")

def nanobind_extension(name, srcs, copts = [], deps = [], visibility = None, **kwargs):
    """The Python module `name`, which is the file name.so.

    Args:
      name: as it is imported, with the folder before it.
      srcs: C++ sources, with the NB_MODULE.
      copts: options of the compiler for them.
      deps: libraries, all linked statically.
      visibility: of the module and its file.
      **kwargs: other arguments of cc_binary.
    """
    cc_binary(
        name = name + ".so",
        srcs = srcs,
        copts = copts + ["-std=c++17", "-fvisibility=hidden", "-fno-stack-protector", "-Os"],
        linkshared = True,
        linkopts = ["-Wl,--gc-sections"],
        visibility = visibility,
        deps = deps + ["@python//:nanobind"],
        **kwargs
    )
    native.alias(
        name = name,
        actual = name + ".so",
        tags = kwargs.get("tags"),
        visibility = visibility,
    )
