#include "bagualu/base/json.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

/// The InvalidInput that `call` throws.
template <class Call>
InvalidInput refusal_of(Call call) {
  try {
    call();
  } catch (const InvalidInput& error) {
    return error;
  }
  ADD_FAILURE() << "did not throw";
  return InvalidInput("", "", "", "");
}

TEST(ParseJsonObject, KeepsTheOrderOfKeys) {
  const Json object = parse_json_object(R"({"b": 1, "a": {"z": 2, "y": 3}})", "text");
  EXPECT_EQ(object.dump(), R"({"b":1,"a":{"z":2,"y":3}})");
}

TEST(ParseJsonObject, RefusesBadText) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"", "content"},
      {" \n ", "content"},
      {"[1]", "content"},
      {"3", "content"},
      {"{\"a\": 1", "line 1, column 8"},
      {"{\n  \"a\": 1,\n  b\n}", "line 3, column 3"},
      {"{\"a\": 1} x", "line 1, column 10"},
      {"{\"a\": 1e999}", "content"},
      {"{\"a\": 1, \"b\": {\"a\": 1}, \"a\": 2}", "a"},
      {"{\"\": 1, \"\": 2}", "\"\""},
      {"{\"a\": " + std::string(1000, '[') + std::string(1000, ']') + "}", "content"},
      {"{\"a\": \"\xff\"}", "line 1, column 8"},
  };
  for (const auto& [text, field] : cases) {
    const InvalidInput error = refusal_of([&] { parse_json_object(text, "here"); });
    EXPECT_EQ(error.where(), "here") << text;
    EXPECT_EQ(error.field(), field) << text << "\n" << error.what();
  }
}

TEST(ReadJsonFile, RefusesMissingFilesAndFolders) {
  const auto folder = std::filesystem::temp_directory_path();
  EXPECT_THROW(read_json_file(folder / "no_such_file.json"), InvalidInput);
  EXPECT_THROW(read_json_file(folder), InvalidInput);
}

TEST(ReadJsonFile, ReadsAnObject) {
  const auto path = std::filesystem::path(testing::TempDir()) / "json_test_object.json";
  std::ofstream(path) << "{\"layers\": 4}\n";
  EXPECT_EQ(read_json_file(path).at("layers"), 4);
  std::filesystem::remove(path);
}

TEST(JsonReader, ReadsEveryType) {
  const Json object = parse_json_object(
      R"({"i": 4, "d": 0.5, "whole": 2, "b": true, "s": "x", "l": [1, 2], "o": {"k": 1},
          "n": null})",
      "text");
  JsonReader reader(object, "text");
  EXPECT_EQ(reader.int64("i", 1, 4), 4);
  EXPECT_EQ(reader.number("d"), 0.5);
  EXPECT_EQ(reader.number("whole"), 2.0);
  EXPECT_TRUE(reader.boolean("b"));
  EXPECT_EQ(reader.string("s"), "x");
  EXPECT_EQ(reader.int64_list("l"), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(reader.object("o").at("k"), 1);
  EXPECT_FALSE(reader.has("n"));
  EXPECT_NO_THROW(reader.finish());
}

TEST(JsonReader, FallsBackOnAbsentAndNull) {
  const Json object = parse_json_object(R"({"n": null})", "text");
  JsonReader reader(object, "text");
  EXPECT_EQ(reader.int64_or("n", 7), 7);
  EXPECT_EQ(reader.int64_or("a", 8), 8);
  EXPECT_EQ(reader.number_or("a", 0.5), 0.5);
  EXPECT_TRUE(reader.boolean_or("a", true));
  EXPECT_EQ(reader.string_or("a", "x"), "x");
  EXPECT_EQ(reader.int64_list_or("a", {3}), (std::vector<int64_t>{3}));
  EXPECT_TRUE(reader.raw("a").is_null());
}

TEST(JsonReader, RefusesWrongTypesAndRanges) {
  const Json object = parse_json_object(
      R"({"i": 4, "d": 4.5, "s": "4", "b": 1, "huge": 18446744073709551615, "l": [1, "x"],
          "o": []})",
      "text");
  JsonReader reader(object, "text");
  EXPECT_THROW(reader.int64("missing"), InvalidInput);
  EXPECT_THROW(reader.int64("i", 5), InvalidInput);
  EXPECT_THROW(reader.int64("i", 0, 3), InvalidInput);
  EXPECT_THROW(reader.int64("d"), InvalidInput);
  EXPECT_THROW(reader.int64("s"), InvalidInput);
  EXPECT_THROW(reader.int64("huge"), InvalidInput);
  EXPECT_THROW(reader.number("s"), InvalidInput);
  EXPECT_THROW(reader.number("d", 0, 1), InvalidInput);
  EXPECT_THROW(reader.boolean("b"), InvalidInput);
  EXPECT_THROW(reader.string("i"), InvalidInput);
  EXPECT_THROW(reader.int64_list("i"), InvalidInput);
  EXPECT_THROW(reader.object("o"), InvalidInput);
  const InvalidInput error = refusal_of([&] { reader.int64_list("l"); });
  EXPECT_EQ(error.field(), "l[1]");
  EXPECT_THROW(JsonReader(object.at("i"), "text.i"), InvalidInput);
}

TEST(JsonReader, SaysTheAllowedRange) {
  const Json object = parse_json_object(R"({"i": 4, "d": 9})", "text");
  JsonReader reader(object, "text");
  const auto allowed = [&](auto call) { return refusal_of(call).allowed(); };
  EXPECT_EQ(allowed([&] { reader.int64("i", 5); }), "an integer of at least 5");
  EXPECT_EQ(allowed([&] { reader.int64("i", std::numeric_limits<int64_t>::min(), 3); }),
            "an integer of at most 3");
  EXPECT_EQ(allowed([&] { reader.int64("i", 0, 3); }), "an integer from 0 to 3");
  EXPECT_EQ(allowed([&] { reader.int64("x"); }), "an integer");
  EXPECT_EQ(allowed([&] { reader.number("d", 0, 1); }), "a number from 0 to 1");
  EXPECT_EQ(allowed([&] { reader.number("d", 10); }), "a number of at least 10");
  EXPECT_EQ(allowed([&] { reader.number("d", -std::numeric_limits<double>::infinity(), 1); }),
            "a number of at most 1");
  EXPECT_EQ(allowed([&] { reader.number("x"); }), "a number");
}

TEST(JsonReader, NamesTheNearestKnownKeyOfATypingMistake) {
  const Json object = parse_json_object(R"({"layers": 4, "hiden": 64})", "text");
  JsonReader reader(object, "text");
  reader.int64("layers");
  reader.has("hidden");
  const InvalidInput error = refusal_of([&] { reader.finish(); });
  EXPECT_EQ(error.field(), "hiden");
  EXPECT_NE(error.allowed().find("\"hidden\""), std::string::npos) << error.what();
}

TEST(JsonReader, NamesAnEmptyKey) {
  const Json object = parse_json_object(R"({"": 1})", "text");
  EXPECT_EQ(refusal_of([&] { JsonReader(object, "text").finish(); }).field(), "\"\"");
}

TEST(JsonReader, CutsLongValuesInMessages) {
  const Json object = {{"s", std::string(500, 'x')}};
  JsonReader reader(object, "text");
  EXPECT_LT(refusal_of([&] { reader.int64("s"); }).found().size(), 80u);
}

}  // namespace
}  // namespace bagualu
