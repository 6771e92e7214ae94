"""rules_cc for Bazel 4.2, which has these rules inside. Its own toolchain loads the last ones from here."""

cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
