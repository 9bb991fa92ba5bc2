#include "bagualu/cli/page_parts.h"

#include <fmt/format.h>

#include <algorithm>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

constexpr const char* kStyle = R"(
:root { --page: #f6f7f9; --card: #ffffff; --text: #24292f; --muted: #667079; --line: #e3e6ea;
  --good: #12735f; --bad: #b3372b; --k0: #8794a3; --k1: #5b8fc7; --k2: #e3a54a; --k3: #9277c0;
  --k4: #5aa67b; --k5: #c8607d; --k6: #77862b; --k7: #a2542f; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --card: #1b2128; --text: #d9dde3; --muted: #929aa5; --line: #2c333b;
    --good: #4cc5ac; --bad: #ff8b7d; --k0: #66727f; --k1: #5b8fc7; --k2: #d79a42; --k3: #9a80c9;
    --k4: #5fb586; --k5: #d9708d; --k6: #b3c45c; --k7: #dd8e67; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 56px; }
h1 { font-size: 28px; line-height: 1.2; font-weight: 600; margin: 0 0 4px; }
h2 { font-size: 16px; font-weight: 600; margin: 0 0 10px; }
h3 { font-size: 14px; font-weight: 500; margin: 0; }
.summary { margin: 0 0 16px; font-size: 16px; color: var(--good); }
.summary.over { color: var(--bad); }
.note { color: var(--muted); font-size: 13px; margin: -6px 0 10px; }
dl { display: flex; flex-wrap: wrap; gap: 12px 28px; margin: 0 0 16px; }
dt { color: var(--muted); font-size: 12px; }
dd { margin: 0; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 18px 20px; margin: 16px 0; min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 18px; }
.scroll { overflow: auto; }
.scroll.high { max-height: 620px; }
.paper { background: #ffffff; border-radius: 4px; padding: 6px; }
.paper svg { width: auto; max-width: none; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; }
.axis { fill: var(--muted); }
line.grid { stroke: var(--line); stroke-width: 1; }
line.budget { stroke: var(--bad); stroke-width: 1.4; stroke-dasharray: 6 4; }
line.calm { stroke: var(--text); stroke-width: 1.6; }
line.asked { stroke: var(--muted); stroke-dasharray: 2 4; }
.budget-text { fill: var(--bad); }
.peak, .peak-text { fill: var(--text); }
.budget-text, .peak-text { paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.hit { fill: transparent; }
.hit:hover { fill: var(--text); fill-opacity: 0.12; }
.curve { fill: none; stroke-width: 1.8; }
.k0 { fill: var(--k0); } .k1 { fill: var(--k1); } .k2 { fill: var(--k2); } .k3 { fill: var(--k3); }
.k4 { fill: var(--k4); } .k5 { fill: var(--k5); } .k6 { fill: var(--k6); } .k7 { fill: var(--k7); }
.c0 { stroke: var(--k1); } .c1 { stroke: var(--k2); } .c2 { stroke: var(--k3); }
.c3 { stroke: var(--k4); } .c4 { stroke: var(--k5); } .c5 { stroke: var(--k6); }
.c6 { stroke: var(--k7); } .c7 { stroke: var(--k0); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 10px; padding: 0;
  list-style: none; font-size: 13px; color: var(--muted); }
.legend svg { display: inline-block; width: 11px; height: 11px; margin-right: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; text-align: left; white-space: nowrap; }
th, td { padding: 5px 16px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; white-space: nowrap; }
.over { color: var(--bad); }
summary { cursor: pointer; margin: 10px 0; }
@media (max-width: 800px) { .grid { grid-template-columns: minmax(0, 1fr); }
  main { padding: 20px 12px 40px; } section { padding: 14px 12px; } }
@media print { body { background: none; } section { break-inside: avoid; } }
)";

/// Bytes of the UTF-8 character at `at`; 0 if there is none.
size_t utf8_length(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
  };
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0U) != 0x80U) return 0;
  }
  // Too long a form, a surrogate, beyond the last character, and the two XML forbids.
  const unsigned second = byte(at + 1);
  if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
      (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F) ||
      (first == 0xEF && second == 0xBF && byte(at + 2) >= 0xBE)) {
    return 0;
  }
  return length;
}

}  // namespace

std::string escape_html(const std::string& text) {
  std::string safe;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    const size_t length = utf8_length(text, at);
    const bool control = static_cast<unsigned char>(c) < 0x20 || c == 0x7F;
    if (length == 0 || (control && c != '\n' && c != '\t')) {
      safe += "\xEF\xBF\xBD";
    } else if (c == '&') {
      safe += "&amp;";
    } else if (c == '<') {
      safe += "&lt;";
    } else if (c == '>') {
      safe += "&gt;";
    } else if (c == '"') {
      safe += "&quot;";
    } else if (c == '\'') {
      safe += "&#39;";
    } else {
      safe.append(text, at, length);
    }
    at += std::max<size_t>(1, length);
  }
  return safe;
}

std::string html_tag(const char* name, const std::string& attributes, const std::string& content) {
  return fmt::format("<{0}{1}>{2}</{0}>\n", name, attributes.empty() ? "" : " " + attributes,
                     content);
}

std::string page_section(const std::string& title, const std::string& note,
                         const std::string& content) {
  if (content.empty()) return "";
  const std::string under = note.empty() ? "" : html_tag("p", "class=\"note\"", escape_html(note));
  return html_tag("section", "", "\n" + html_tag("h2", "", escape_html(title)) + under + content);
}

std::string page_legend(const std::vector<std::string>& kinds, size_t first) {
  std::string items;
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    items +=
        html_tag("li", "",
                 fmt::format("<svg viewBox=\"0 0 1 1\" aria-hidden=\"true\"><rect class=\"k{}\" "
                             "width=\"1\" height=\"1\"/></svg>{}",
                             (first + kind) % 8, escape_html(kinds[kind])));
  }
  return html_tag("ul", "class=\"legend\"", "\n" + items);
}

std::string page_facts(const std::vector<std::pair<std::string, std::string>>& facts) {
  std::string items;
  for (const auto& [name, value] : facts) {
    items += html_tag(
        "div", "", html_tag("dt", "", escape_html(name)) + html_tag("dd", "", escape_html(value)));
  }
  return items.empty() ? "" : html_tag("dl", "", "\n" + items);
}

std::string page_table(const PageTable& table) {
  const auto cell = [&](const char* name, size_t column, const std::string& text) {
    const bool number = column < table.numeric.size() && table.numeric[column];
    return html_tag(name, number ? "class=\"number\"" : "", escape_html(text));
  };
  std::string head;
  for (size_t c = 0; c < table.head.size(); ++c) head += cell("th", c, table.head[c]);
  std::string body;
  for (const std::vector<std::string>& row : table.rows) {
    BGL_CHECK(row.size() == table.head.size(), row.size(), table.head.size());
    std::string cells;
    for (size_t c = 0; c < row.size(); ++c) cells += cell("td", c, row[c]);
    body += html_tag("tr", "", "\n" + cells);
  }
  return html_tag("div", "class=\"scroll high\"",
                  "\n" + html_tag("table", "",
                                  html_tag("thead", "", html_tag("tr", "", "\n" + head)) +
                                      html_tag("tbody", "", "\n" + body)));
}

std::string page_head(const std::string& title, const std::string& summary, bool bad) {
  std::string html = html_tag("h1", "", escape_html(title));
  if (!summary.empty()) {
    html +=
        html_tag("p", bad ? "class=\"summary over\"" : "class=\"summary\"", escape_html(summary));
  }
  return html;
}

std::string page_notes(const std::vector<std::string>& notes) {
  std::string items;
  for (const std::string& note : notes) items += html_tag("li", "", escape_html(note));
  return items.empty() ? "" : page_section("Notes", "", html_tag("ul", "", "\n" + items));
}

std::string page_document(const std::string& title, const std::string& body) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n"
      "<meta name=\"color-scheme\" content=\"light dark\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'\"/>\n<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n{}"
      "</main>\n</body>\n</html>\n",
      escape_html(title), kStyle, body);
}

}  // namespace bagualu
