// Parts of the pages that this program writes: self-contained HTML files, drawn as inline SVG.
//
// Invariants
//   Nothing is fetched: no script, no link, no font. Texts are escaped, whatever they hold. A page
//   is well-formed XML too, so that tools can check it.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace bagualu {

/// A table of texts.
struct PageTable {
  std::string title;
  std::string note;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;  ///< as long as head
  /// By column: numbers stand right. Empty: texts all.
  std::vector<bool> numeric;
};

/// Text for element content and attributes: & < > " ' become entities; control characters and bytes
/// that are no UTF-8 become U+FFFD.
std::string escape_html(const std::string& text);

/// "<name attributes>content</name>"; nothing is escaped.
std::string html_tag(const char* name, const std::string& attributes, const std::string& content);
/// Title and one sentence under it, in red if it is `bad`.
std::string page_head(const std::string& title, const std::string& summary, bool bad);
/// Names and values.
std::string page_facts(const std::vector<std::pair<std::string, std::string>>& facts);
/// A section with a heading; empty if `content`, which is HTML, is.
std::string page_section(const std::string& title, const std::string& note,
                         const std::string& content);
/// Names of the colours k0, k1, ..., from `first` on; there are eight, which come again.
std::string page_legend(const std::vector<std::string>& kinds, size_t first = 0);
std::string page_table(const PageTable& table);
/// Section of a list; empty if there is none.
std::string page_notes(const std::vector<std::string>& notes);
/// The whole file around a body.
std::string page_document(const std::string& title, const std::string& body);

}  // namespace bagualu
