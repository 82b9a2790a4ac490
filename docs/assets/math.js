// What pymdownx.arithmatex marked, drawn by KaTeX (katex/, 0.19.1, unchanged but for its
// woff and ttf fonts, which no browser with woff2 asks for).
document.addEventListener("DOMContentLoaded", () =>
  renderMathInElement(document.body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
      { left: "$$", right: "$$", display: true },
      { left: "$", right: "$", display: false },
    ],
    ignoredClasses: ["highlight", "jp-OutputArea-output"],
  }),
);
