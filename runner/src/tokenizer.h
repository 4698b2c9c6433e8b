// Gemma's tokenizer, read from tokenizer.json: byte-pair encoding with byte fallback.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace g4 {

class Tokenizer {
 public:
  // Throws Error for a file that is missing, broken, or of another kind of tokenizer.
  explicit Tokenizer(const std::string& path);

  // UTF-8 text -> ids. Special tokens spelled out in the text become their ids; no BOS is added.
  // Throws Error for text that is not UTF-8.
  std::vector<int64_t> encode(std::string_view text) const;

  // The same for a chat turn: `before` and `after` are the chat template's, and control tokens
  // typed in `message` stay plain characters: they cannot end the turn nor begin another.
  std::vector<int64_t> encode_turn(std::string_view before, std::string_view message,
                                   std::string_view after) const;

 private:
  friend class TextStream;

  struct Added {
    std::string content;
    int64_t id;
  };
  struct Piece {
    std::string text;
    int64_t id;  // -1: text that no added token matched
  };
  // By first byte, longest first.
  using AddedTokens = std::array<std::vector<Added>, 256>;

  static std::vector<Piece> split(std::string_view text, const AddedTokens& tokens);
  void merge(std::string_view word, std::vector<int64_t>& ids) const;

  std::unordered_map<std::string, int64_t> vocabulary_;
  std::vector<std::string> content_;  // by id
  std::vector<bool> special_;         // by id
  std::array<int64_t, 256> bytes_{};  // ids of <0x00> to <0xFF>
  std::vector<int> byte_of_;          // by id; -1: no byte token
  struct Merge {
    uint32_t rank;
    int64_t result;
  };
  std::unordered_map<uint64_t, Merge> merges_;  // of two ids of 32 bits
  AddedTokens raw_added_;                       // matched before spaces are replaced
  AddedTokens normalized_added_;                // matched after
  AddedTokens controls_;                        // those of either that are no ordinary text
};

// Ids -> UTF-8 text, as they come. Special tokens give none.
class TextStream {
 public:
  explicit TextStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // The text that this id completes.
  std::string add(int64_t id);
  // What is left at the end.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string bytes_;  // of a run of byte tokens, which is text only as a whole
};

}  // namespace g4
