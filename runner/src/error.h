// What a user can mend: one sentence that says what is wrong, where, and what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace g4 {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A wrong command line; the process exits with 2 instead of 1.
struct UsageError : Error {
  using Error::Error;
};

}  // namespace g4
