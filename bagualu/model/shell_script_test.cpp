#include "bagualu/model/shell_script.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bagualu/base/error.h"

namespace bagualu {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// Words of the last command that the script would start.
std::vector<std::string> last_words(std::string_view script,
                                    const std::map<std::string, std::string>& given = {}) {
  const ShellResult result = follow_shell_script(script, "script", given);
  return result.commands.empty() ? std::vector<std::string>() : result.commands.back().words;
}

std::string last_doubt(std::string_view script,
                       const std::map<std::string, std::string>& given = {}) {
  return follow_shell_script(script, "script", given).commands.back().doubtful;
}

TEST(ShellScript, QuotesCommentsAndContinuedLinesMakeWords) {
  EXPECT_THAT(last_words("run a 'b c' \"d e\" f\\ g # h\n"),
              ElementsAre("run", "a", "b c", "d e", "f g"));
  EXPECT_THAT(last_words("run a \\\n  b#c \\\n  d\n"), ElementsAre("run", "a", "b#c", "d"));
  EXPECT_THAT(last_words("run 'it''s' \"\" $'x'"), ElementsAre("run", "its", "", "$x"));
}

TEST(ShellScript, VariablesAreReplacedAndUnquotedOnesSplit) {
  EXPECT_THAT(last_words("A='1 2'\nrun $A \"$A\" x${A}y"),
              ElementsAre("run", "1", "2", "1 2", "x1", "2y"));
  EXPECT_THAT(last_words("run $NOBODY a \"$NOBODY\" b"), ElementsAre("run", "a", "", "b"));
  EXPECT_THAT(last_words("A=1; A+=2; export B=$A; run $B"), ElementsAre("run", "12"));
  EXPECT_THAT(last_words("run $A", {{"A", "given"}}), ElementsAre("run", "given"));
}

TEST(ShellScript, DefaultsAndAlternatives) {
  EXPECT_THAT(last_words("run ${A:-8} ${A-9} ${A:=7} $A ${A:+set} ${1:-x}"),
              ElementsAre("run", "8", "9", "7", "7", "set", "x"));
  EXPECT_THAT(last_words("A=3\nrun ${A:-8} ${B:-${A}0} ${A:+yes}${B:+no}"),
              ElementsAre("run", "3", "30", "yes"));
}

TEST(ShellScript, ArraysKeepTheirWords) {
  EXPECT_THAT(last_words("A=(--a 1 # one\n \"b c\")\nA+=(d)\nrun \"${A[@]}\" ${#A[@]} ${A[1]}"),
              ElementsAre("run", "--a", "1", "b c", "d", "4", "1"));
  // Unquoted, "--x 1" in one element is two words, which launch scripts rely on.
  EXPECT_THAT(last_words("A=(\"--x 1\")\nrun ${A[@]} ${A[*]}"),
              ElementsAre("run", "--x", "1", "--x", "1"));
}

TEST(ShellScript, ArithmeticOfIntegers) {
  EXPECT_THAT(last_words("N=4\nG=8\nrun $(($N*G)) $(( (N + 2) % 4 - 7 / 2 )) $((N/0))"),
              ElementsAre("run", "32", "-1", "$((N/0))"));
}

TEST(ShellScript, KnownConditionsAreDecided) {
  const char* script = "if [[ \"$D\" == \"fp8\" && -n \"$X\" ]]; then A=8; else A=16; fi\nrun $A";
  EXPECT_THAT(last_words(script, {{"D", "fp8"}, {"X", "1"}}), ElementsAre("run", "8"));
  EXPECT_THAT(last_words(script, {{"D", "fp8"}}), ElementsAre("run", "16"));
  EXPECT_THAT(last_words("if [ -z \"$A\" ]; then A=2; elif [ 1 -lt 2 ]; then A=3; fi; run $A"),
              ElementsAre("run", "2"));
  EXPECT_THAT(last_words("N=2; [ $N -ge 2 ] && A=yes || A=no; run $A"), ElementsAre("run", "yes"));
  EXPECT_THAT(
      last_words("S=7B\ncase $S in\n 1B) L=16;;\n 7B|8B)\n L=32 ;;\n *) L=0;; esac\nrun $L"),
      ElementsAre("run", "32"));
}

TEST(ShellScript, UnknownConditionsMakeDoubt) {
  EXPECT_EQ(last_doubt("if [ -f x ]; then A=1; fi\nrun $A"), "A");
  EXPECT_EQ(last_doubt("if [ \"$1\" = a ]; then A=1; fi\nB=${A}2\nrun $B"), "B");
  EXPECT_EQ(last_doubt("for i in 1 2; do A+=($i); done; run ${A[@]}"), "A");
  EXPECT_EQ(last_doubt("if [ -f x ]; then A=1; fi\nrun b"), "");
  // What the caller says settles it.
  EXPECT_EQ(last_doubt("if [ -f x ]; then A=1; fi\nrun $A", {{"A", "2"}}), "");
}

TEST(ShellScript, RedirectionsPipesAndDocumentsAreNoWords) {
  EXPECT_THAT(follow_shell_script("run a > log 2>&1 | tee b\n", "script", {}).commands[0].words,
              ElementsAre("run", "a"));
  EXPECT_THAT(last_words("cat <<EOF > x\nrun --not $A\nEOF\nrun a"), ElementsAre("run", "a"));
}

TEST(ShellScript, FunctionsAreFollowedWhereTheyStand) {
  EXPECT_THAT(follow_shell_script("f() {\n run a\n}\nf\n", "script", {}).commands, SizeIs(2));
  EXPECT_THAT(last_words("function g { run b; }\n"), ElementsAre("run", "b"));
}

TEST(ShellScript, RefusesWhatDoesNotParse) {
  for (const char* script :
       {"run 'open", "run \"open", "run ${open", "run $(open", "A=(1 2", "if true; then run",
        "case x in a) run", "fi", ")", "run; done", "for x in a; run"}) {
    EXPECT_THROW(follow_shell_script(script, "script", {}), InvalidInput) << script;
  }
  std::string deep;
  for (int i = 0; i < 200; ++i) deep += "if true; then ";
  EXPECT_THROW(follow_shell_script(deep, "script", {}), InvalidInput);
}

TEST(ShellScript, RefusesScriptsThatGrowWithoutEnd) {
  std::string script = "A=0123456789\n";
  for (int i = 0; i < 40; ++i) script += "A=$A$A\n";
  EXPECT_THROW(follow_shell_script(script, "script", {}), InvalidInput);
}

}  // namespace
}  // namespace bagualu
