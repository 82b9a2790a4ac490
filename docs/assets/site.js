document.addEventListener("DOMContentLoaded", () => {
  // What pymdownx.arithmatex marked, drawn by KaTeX (katex/, 0.19.1, unchanged but for its
  // woff and ttf fonts, which no browser with woff2 asks for).
  renderMathInElement(document.body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
      { left: "$$", right: "$$", display: true },
      { left: "$", right: "$", display: false },
    ],
    ignoredClasses: ["highlight", "jp-OutputArea-output"],
  });
  // A picture can be looked at in its own size.
  for (const image of document.querySelectorAll('.md-content img[src*="pictures/"]')) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src;
    image.replaceWith(link);
    link.append(image);
  }
});
