"use strict";
// Python with its words coloured, as text nodes in spans. Only for the eye: a wrong guess colours a word wrongly.

const PYTHON = new RegExp([
  String.raw`(?<comment>#[^\n]*)`,
  String.raw`(?<string>(?:\b[rbfuRBFU]{1,2})?(?:"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?))`,
  String.raw`(?<number>\b(?:0[xX][\da-fA-F_]+|\d[\d_]*\.?[\d_]*(?:[eE][+-]?\d+)?j?))`,
  String.raw`(?<keyword>\b(?:False|None|True|and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|global|if|import|in|is|lambda|match|nonlocal|not|or|pass|raise|return|try|while|with|yield)\b)`,
  String.raw`(?<name>\b[A-Za-z_]\w*(?=\s*\())`,
].join("|"), "g");

function pythonCode(code) {
  const shown = make("pre", { className: "code" });
  let end = 0;
  for (const match of code.matchAll(PYTHON)) {
    const [kind, text] = Object.entries(match.groups).find(([, value]) => value !== undefined);
    shown.append(code.slice(end, match.index), make("span", { className: kind }, text));
    end = match.index + text.length;
  }
  shown.append(code.slice(end));
  return shown;
}
