#include "tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <queue>

#include "error.h"

namespace g4 {
namespace {

using nlohmann::json;

constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581, how the vocabulary spells a space
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

std::string replace_all(std::string_view text, std::string_view from, std::string_view to) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at, from.size()) == from) {
      result += to;
      at += from.size();
    } else {
      result += text[at++];
    }
  }
  return result;
}

// Bytes of the UTF-8 character at the front of `text`; 0 if there is none. RFC 3629, section 4.
size_t character_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto tail = [&](size_t i, unsigned low = 0x80, unsigned high = 0xBF) {
    return i < text.size() && byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80) {
    return 1;
  }
  if (first >= 0xC2 && first <= 0xDF) {
    return tail(1) ? 2 : 0;
  }
  if (first >= 0xE0 && first <= 0xEF) {
    const bool second = tail(1, first == 0xE0 ? 0xA0 : 0x80, first == 0xED ? 0x9F : 0xBF);
    return second && tail(2) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const bool second = tail(1, first == 0xF0 ? 0x90 : 0x80, first == 0xF4 ? 0x8F : 0xBF);
    return second && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = character_length(text);
    if (length == 0) {
      return false;
    }
    text.remove_prefix(length);
  }
  return true;
}

json read_json(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error("cannot read " + path + ": export the model again, with its tokenizer.");
  }
  try {
    return json::parse(file);
  } catch (const json::exception&) {
    throw Error(path + " is not valid JSON: export the model again.");
  }
}

uint64_t pair_key(int64_t left, int64_t right) {
  return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
}

// Gemma also lists newline runs and HTML tags as added tokens: ordinary text, no control.
bool control_shape(std::string_view token) {
  return token.starts_with("<|") || token.ends_with("|>");
}

void check_kind(const json& root) {
  const json& model = root.at("model");
  const json& normalizer = root.at("normalizer");
  const bool known = model.at("type") == "BPE" && model.value("byte_fallback", false) &&
      model.value("fuse_unk", false) && normalizer.at("type") == "Replace" &&
      normalizer.at("pattern").value("String", "") == " " && normalizer.at("content") == kSpace;
  if (!known) {
    throw Error("it is not Gemma's byte-pair encoding with byte fallback");
  }
}

}  // namespace

Tokenizer::Tokenizer(const std::string& path) {
  const json root = read_json(path);
  try {
    check_kind(root);
    const json& model = root.at("model");
    size_t count = 0;
    for (const auto& [text, id] : model.at("vocab").items()) {
      vocabulary_[text] = id.get<int64_t>();
      count = std::max(count, id.get<size_t>() + 1);
    }
    for (const json& token : root.at("added_tokens")) {
      count = std::max(count, token.at("id").get<size_t>() + 1);
    }
    content_.resize(count);
    special_.resize(count);
    byte_of_.assign(count, -1);
    for (const auto& [text, id] : vocabulary_) {
      content_[id] = text;
    }
    for (const json& token : root.at("added_tokens")) {
      if (token.value("single_word", false) || token.value("lstrip", false) ||
          token.value("rstrip", false)) {
        throw Error("an added token strips spaces or matches whole words only");
      }
      const bool normalized = token.value("normalized", false);
      Added added{token.at("content").get<std::string>(), token.at("id").get<int64_t>()};
      content_[added.id] = added.content;
      special_[added.id] = token.value("special", false);
      if (added.content.size() > 1 && (special_[added.id] || control_shape(added.content))) {
        controls_[static_cast<unsigned char>(added.content[0])].push_back(added);
      }
      if (normalized) {
        added.content = replace_all(added.content, " ", kSpace);
      }
      if (!added.content.empty()) {
        auto& tokens = normalized ? normalized_added_ : raw_added_;
        tokens[static_cast<unsigned char>(added.content[0])].push_back(added);
      }
    }
    for (AddedTokens* tokens : {&raw_added_, &normalized_added_, &controls_}) {
      for (auto& same_start : *tokens) {
        std::stable_sort(same_start.begin(), same_start.end(), [](const Added& a, const Added& b) {
          return a.content.size() > b.content.size();
        });
      }
    }
    for (int byte = 0; byte < 256; ++byte) {
      std::array<char, 8> name{};
      std::snprintf(name.data(), name.size(), "<0x%02X>", byte);
      bytes_[byte] = vocabulary_.at(name.data());
      byte_of_[bytes_[byte]] = byte;
    }
    uint32_t rank = 0;
    for (const json& pair : model.at("merges")) {
      std::string left;
      std::string right;
      if (pair.is_array()) {
        left = pair.at(0).get<std::string>();
        right = pair.at(1).get<std::string>();
      } else {  // the older spelling, "left right"
        const std::string text = pair.get<std::string>();
        const size_t space = text.find(' ');
        left = text.substr(0, space);
        right = text.substr(space + 1);
      }
      const uint64_t key = pair_key(vocabulary_.at(left), vocabulary_.at(right));
      merges_[key] = {rank++, vocabulary_.at(left + right)};
    }
  } catch (const json::exception&) {
    throw Error(path + " lacks a part of a tokenizer: export the model again.");
  } catch (const std::out_of_range&) {
    throw Error(path + " names a token that its vocabulary lacks: export the model again.");
  } catch (const Error& error) {
    throw Error(path + ": " + error.what() + ", and this runner reads no other.");
  }
}

std::vector<Tokenizer::Piece> Tokenizer::split(std::string_view text, const AddedTokens& tokens) {
  std::vector<Piece> pieces;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const Added* found = nullptr;
    for (const Added& token : tokens[static_cast<unsigned char>(text[at])]) {
      if (text.substr(at, token.content.size()) == token.content) {
        found = &token;
        break;
      }
    }
    if (!found) {
      ++at;
      continue;
    }
    if (at > begin) {
      pieces.push_back({std::string(text.substr(begin, at - begin)), -1});
    }
    pieces.push_back({found->content, found->id});
    at += found->content.size();
    begin = at;
  }
  if (begin < text.size()) {
    pieces.push_back({std::string(text.substr(begin)), -1});
  }
  return pieces;
}

std::vector<int64_t> Tokenizer::encode(std::string_view text) const {
  if (!is_utf8(text)) {
    throw Error("the prompt is not UTF-8 text.");
  }
  std::vector<int64_t> ids;
  for (const Piece& outer : split(text, raw_added_)) {
    if (outer.id >= 0) {
      ids.push_back(outer.id);
      continue;
    }
    for (const Piece& inner : split(replace_all(outer.text, " ", kSpace), normalized_added_)) {
      if (inner.id >= 0) {
        ids.push_back(inner.id);
      } else {
        merge(inner.text, ids);
      }
    }
  }
  return ids;
}

std::vector<int64_t> Tokenizer::encode_turn(std::string_view before, std::string_view message,
                                            std::string_view after) const {
  if (!is_utf8(message)) {
    throw Error("the prompt is not UTF-8 text.");
  }
  // A cut after a control token's first character leaves two texts that hold no token. The mark
  // that `g4 run` cuts at, a noncharacter, is dropped as it is there.
  std::vector<int64_t> ids;
  std::string text(before);
  const auto flush = [&] {
    const auto found = encode(text);
    ids.insert(ids.end(), found.begin(), found.end());
    text.clear();
  };
  for (const Piece& piece : split(replace_all(message, "\xF4\x8F\xBF\xBF", ""), controls_)) {
    if (piece.id < 0) {
      text += piece.text;
      continue;
    }
    const size_t first = character_length(piece.text);
    text += piece.text.substr(0, first);
    flush();
    text = piece.text.substr(first);
  }
  text += after;
  flush();
  return ids;
}

// Merges neighbours by rank, leftmost first among equals, until no pair is left that merges. A
// queue of candidates over a linked list: a long line costs n log n.
void Tokenizer::merge(std::string_view word, std::vector<int64_t>& ids) const {
  struct Symbol {
    int64_t id;
    int32_t previous;
    int32_t next;
  };
  struct Candidate {
    uint32_t rank;
    int32_t at;
    int64_t left;
    int64_t right;
    int64_t result;
    bool operator<(const Candidate& other) const {  // the queue's top is its greatest
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  std::vector<Symbol> symbols;
  const auto append = [&](int64_t id) {
    const auto here = static_cast<int32_t>(symbols.size());
    symbols.push_back({id, here - 1, here + 1});
  };
  while (!word.empty()) {
    const std::string_view character = word.substr(0, character_length(word));
    word.remove_prefix(character.size());
    if (const auto found = vocabulary_.find(std::string(character)); found != vocabulary_.end()) {
      append(found->second);
    } else {
      for (const char byte : character) {
        append(bytes_[static_cast<unsigned char>(byte)]);
      }
    }
  }
  symbols.back().next = -1;

  std::priority_queue<Candidate> queue;
  const auto consider = [&](int32_t left) {
    const int32_t right = left < 0 ? -1 : symbols[left].next;
    if (right < 0) {
      return;
    }
    const int64_t a = symbols[left].id;
    const int64_t b = symbols[right].id;
    if (const auto found = merges_.find(pair_key(a, b)); found != merges_.end()) {
      queue.push({found->second.rank, left, a, b, found->second.result});
    }
  };
  for (size_t i = 0; i < symbols.size(); ++i) {
    consider(static_cast<int32_t>(i));
  }
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.at];
    // One of the two may have gone into another merge since.
    if (left.id != best.left || left.next < 0 || symbols[left.next].id != best.right) {
      continue;
    }
    Symbol& right = symbols[left.next];
    left.id = best.result;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) {
      symbols[left.next].previous = best.at;
    }
    consider(left.previous);
    consider(best.at);
  }
  for (int32_t at = 0; at >= 0; at = symbols[at].next) {
    ids.push_back(symbols[at].id);
  }
}

std::string TextStream::add(int64_t id) {
  if (id < 0 || static_cast<size_t>(id) >= tokenizer_.content_.size()) {
    throw Error("the program gave the id " + std::to_string(id) +
                ", which the tokenizer lacks: it belongs to another model.");
  }
  if (tokenizer_.byte_of_[id] >= 0) {
    bytes_ += static_cast<char>(tokenizer_.byte_of_[id]);
    return {};
  }
  std::string text = finish();
  if (!tokenizer_.special_[id]) {
    text += replace_all(tokenizer_.content_[id], kSpace, " ");
  }
  return text;
}

std::string TextStream::finish() {
  std::string text;
  if (is_utf8(bytes_)) {
    text = bytes_;
  } else {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      text += kReplacement;
    }
  }
  bytes_.clear();
  return text;
}

}  // namespace g4
