"""rules_java for Bazel 4.2, which has these rules inside. Its registered toolchains load them, though nothing here is Java."""

java_import = native.java_import
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
