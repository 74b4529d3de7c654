// An engine's answer on the wire: its head, and where its body ends.
//
//   HTTP/1.1 200 OK\r\n  name: value\r\n ... \r\n   body
//   └──────────── parse_head ─────────────────┘    └─ Body::decode: content-length, chunks, or the
//                                                      end of the connection
//
// The relay reads only what it must know: the status, how the body is delimited, whether it is a
// stream of events, and whether the connection persists. The head goes to Python as it came.
// Anything that two readers could understand differently is refused: two lengths, a length beside
// chunks, a coding other than chunks, a bare line feed in a chunk's size, a bare carriage return.
//
// Costs: a head O(bytes) once; a body O(bytes), without copies except to close the gaps between
// chunks that came in one receive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvd::relay {

enum class Delimiter : uint8_t { kNone, kLength, kChunks, kClose };

struct AnswerHead {
  int status = 0;
  Delimiter delimiter = Delimiter::kClose;
  uint64_t length = 0;  // bytes, with kLength
  bool events = false;  // text/event-stream, and no error
  bool opaque = false;  // the same, but compressed: nobody can read the events on their way
  bool persists = false;
};

enum class Parsed : uint8_t { kWhole, kPart, kWrong };

inline char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c; }

// Whether [at, end) is `word`, which is in lower case.
inline bool is_word(const char* at, const char* end, const char* word) {
  for (; at < end && *word != '\0'; ++at, ++word) {
    if (lower(*at) != *word) return false;
  }
  return at == end && *word == '\0';
}

inline bool begins_with(const char* at, const char* end, const char* word) {
  const size_t size = std::strlen(word);
  return static_cast<size_t>(end - at) >= size && is_word(at, at + size, word);
}

// Whether a comma-separated list has `word`, which is in lower case, among its elements.
inline bool has_element(const char* at, const char* end, const char* word) {
  while (at < end) {
    const char* stop = static_cast<const char*>(std::memchr(at, ',', end - at));
    if (stop == nullptr) stop = end;
    const char* last = stop;
    while (at < last && (*at == ' ' || *at == '\t')) ++at;
    while (last > at && (last[-1] == ' ' || last[-1] == '\t')) --last;
    if (is_word(at, last, word)) return true;
    at = stop + 1;
  }
  return false;
}

// Whether [at, end) can be a field's name: not empty, and without the blanks and controls with
// which readers differ in what they take for the name (obs-fold, a blank before the colon).
inline bool is_name(const char* at, const char* end) {
  if (at == end) return false;
  for (; at < end; ++at) {
    if (*at <= ' ' || *at > '~') return false;
  }
  return true;
}

// Reads a length of at most 18 digits; false for anything else.
inline bool read_length(const char* at, const char* end, uint64_t& length) {
  if (at == end || end - at > 18) return false;
  length = 0;
  for (; at < end; ++at) {
    if (*at < '0' || *at > '9') return false;
    length = length * 10 + static_cast<uint64_t>(*at - '0');
  }
  return true;
}

// Reads the head at the start of `data`. Sets `size` to its bytes, including the empty line.
inline Parsed parse_head(const char* data, size_t n, AnswerHead& head, size_t& size) {
  // What cannot become a head is refused at once: its sender may say no more.
  if (std::memcmp(data, "HTTP/1.", n < 7 ? n : 7) != 0) return Parsed::kWrong;
  const void* found = memmem(data, n, "\r\n\r\n", 4);
  if (found == nullptr) return Parsed::kPart;
  size = static_cast<size_t>(static_cast<const char*>(found) - data) + 4;
  const char* end = data + size - 2;  // behind the last line's CRLF
  if (size < 14 || data[8] != ' ') return Parsed::kWrong;
  if (data[7] != '0' && data[7] != '1') return Parsed::kWrong;
  head = AnswerHead{};
  head.persists = data[7] == '1';
  for (int i = 9; i < 12; ++i) {
    if (data[i] < '0' || data[i] > '9') return Parsed::kWrong;
    head.status = head.status * 10 + (data[i] - '0');
  }
  if (head.status < 100 || (data[12] != ' ' && data[12] != '\r')) return Parsed::kWrong;
  bool has_length = false, coded = false, compressed = false;
  const char* line = static_cast<const char*>(std::memchr(data, '\n', size)) + 1;
  while (line < end) {
    const char* stop = static_cast<const char*>(std::memchr(line, '\n', end - line));
    if (stop == nullptr || stop[-1] != '\r') return Parsed::kWrong;
    if (std::memchr(line, '\r', stop - 1 - line) != nullptr) return Parsed::kWrong;
    if (std::memchr(line, '\0', stop - line) != nullptr) return Parsed::kWrong;
    const char* colon = static_cast<const char*>(std::memchr(line, ':', stop - line));
    if (colon == nullptr || !is_name(line, colon)) return Parsed::kWrong;
    const char *value = colon + 1, *value_end = stop - 1;
    while (value < value_end && (*value == ' ' || *value == '\t')) ++value;
    while (value_end > value && (value_end[-1] == ' ' || value_end[-1] == '\t')) --value_end;
    if (is_word(line, colon, "content-length")) {
      uint64_t length = 0;
      if (!read_length(value, value_end, length)) return Parsed::kWrong;
      if (has_length && length != head.length) return Parsed::kWrong;
      has_length = true;
      head.length = length;
    } else if (is_word(line, colon, "transfer-encoding")) {
      if (coded || !is_word(value, value_end, "chunked")) return Parsed::kWrong;
      coded = true;
    } else if (is_word(line, colon, "connection")) {
      if (has_element(value, value_end, "close")) head.persists = false;
    } else if (is_word(line, colon, "content-type")) {
      head.events = begins_with(value, value_end, "text/event-stream");
    } else if (is_word(line, colon, "content-encoding")) {
      compressed = compressed || !is_word(value, value_end, "identity");
    }
    line = stop + 1;
  }
  if (has_length && coded) return Parsed::kWrong;  // request smuggling's oldest form
  if (head.status >= 400) head.events = false;     // an error, however it is announced
  head.opaque = head.events && compressed;
  if (head.opaque) head.events = false;
  if (head.status < 200 || head.status == 204 || head.status == 304) {
    head.delimiter = Delimiter::kNone;
    if (coded || head.length != 0) head.persists = false;  // a body may come all the same
  } else if (coded) {
    head.delimiter = Delimiter::kChunks;
  } else if (has_length) {
    head.delimiter = head.length == 0 ? Delimiter::kNone : Delimiter::kLength;
  } else {
    head.persists = false;
  }
  return Parsed::kWhole;
}

// Finds where a body ends, as it is received.
class Body {
 public:
  void begin(const AnswerHead& head) {
    delimiter_ = head.delimiter;
    left_ = head.length;
    state_ = State::kSize;
    line_ = 0;
    complete_ = delimiter_ == Delimiter::kNone;
  }

  bool complete() const { return complete_; }

  // Whether the body ends with its connection.
  bool ends_by_close() const { return delimiter_ == Delimiter::kClose; }

  // Turns `n` received bytes into the payload in them, in place, and sets `payload` to its size and
  // `used` to the bytes that belong to this body. False if the bytes are not a valid body.
  bool decode(char* data, size_t n, size_t& payload, size_t& used) {
    payload = used = 0;
    if (complete_) return true;
    switch (delimiter_) {
      case Delimiter::kNone:
        return true;
      case Delimiter::kClose:
        payload = used = n;
        return true;
      case Delimiter::kLength:
        payload = used = n < left_ ? n : static_cast<size_t>(left_);
        left_ -= used;
        complete_ = left_ == 0;
        return true;
      case Delimiter::kChunks:
        return decode_chunks(data, n, payload, used);
    }
    return false;
  }

 private:
  enum class State : uint8_t { kSize, kExtension, kSizeEnd, kData, kDataCr, kDataLf, kTrailer };
  static constexpr uint32_t kMaxLine = 4096;  // bytes of a size line, and of all trailers

  bool decode_chunks(char* data, size_t n, size_t& payload, size_t& used) {
    size_t at = 0;
    while (at < n && !complete_) {
      if (state_ == State::kData) {
        const size_t piece = n - at < left_ ? n - at : static_cast<size_t>(left_);
        if (payload != at) std::memmove(data + payload, data + at, piece);
        payload += piece;
        at += piece;
        left_ -= piece;
        if (left_ == 0) state_ = State::kDataCr;
        continue;
      }
      if (!step(data[at++])) return false;
    }
    used = at;
    return true;
  }

  // Reads one byte of the lines between chunks.
  bool step(char c) {
    if (++line_ > kMaxLine) return false;
    switch (state_) {
      case State::kSize:
        if (c == '\r' || c == ';' || c == ' ') {
          if (line_ == 1) return false;  // no digit
          state_ = c == '\r' ? State::kSizeEnd : State::kExtension;
          return true;
        }
        return add_digit(lower(c));
      case State::kExtension:
        if (c == '\r') state_ = State::kSizeEnd;
        return c != '\n';
      case State::kSizeEnd:
        if (c != '\n') return false;
        line_ = 0;
        trailer_begins_ = true;
        state_ = left_ == 0 ? State::kTrailer : State::kData;
        return true;
      case State::kDataCr:
        state_ = State::kDataLf;
        return c == '\r';
      case State::kDataLf:
        line_ = 0;
        left_ = 0;
        state_ = State::kSize;
        return c == '\n';
      case State::kTrailer:  // trailers are read and dropped, up to an empty line
        if (c == '\n') {
          complete_ = trailer_begins_;
          trailer_begins_ = true;
        } else if (c != '\r') {
          trailer_begins_ = false;
        }
        return true;
      case State::kData:
        break;
    }
    return false;
  }

  bool add_digit(char c) {
    int digit;
    if (c >= '0' && c <= '9') {
      digit = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      digit = c - 'a' + 10;
    } else {
      return false;
    }
    if (line_ > 15) return false;  // 2^60 bytes
    if (line_ == 1) left_ = 0;
    left_ = left_ * 16 + static_cast<uint64_t>(digit);
    return true;
  }

  Delimiter delimiter_ = Delimiter::kNone;
  State state_ = State::kSize;
  bool complete_ = true;
  bool trailer_begins_ = true;  // at the beginning of a trailer's line
  uint32_t line_ = 0;           // bytes of the current line
  uint64_t left_ = 0;           // bytes left of the length or the chunk
};

// Whether an event only opens a chat: it names the role, and its text is empty. It comes with the
// first token, or before an engine says that it has given the request up.
inline bool opens_chat(const char* event, size_t n) {
  const char* end = event + n;
  if (memmem(event, n, "\"role\"", 6) == nullptr) return false;
  const char* at = static_cast<const char*>(memmem(event, n, "\"content\"", 9));
  if (at == nullptr) return false;
  at += 9;
  while (at < end && (*at == ' ' || *at == ':')) ++at;
  return end - at >= 2 && at[0] == '"' && at[1] == '"';
}

// Returns the end of the first event that says something at the start of a stream, or 0 while it is
// not complete. Events of comments alone, or with a name but no data, do not count, and of those
// that only open a chat one: some engines send the role, and no text, with each token of reasoning.
inline size_t first_event(const char* data, size_t n) {
  bool has_data = false, opened = false;
  size_t line = 0, event = 0;
  for (size_t i = 0; i < n; ++i) {
    if (data[i] != '\n' && data[i] != '\r') continue;
    const bool empty = i == line;
    if (empty && has_data) {
      if (opened || !opens_chat(data + event, i - event)) return i + 1;
      opened = true;
    }
    if (!empty && n - line >= 5 && std::memcmp(data + line, "data:", 5) == 0) has_data = true;
    if (data[i] == '\r' && i + 1 < n && data[i + 1] == '\n') ++i;
    line = i + 1;
    if (empty) {
      has_data = false;
      event = line;
    }
  }
  return 0;
}

}  // namespace kvd::relay
