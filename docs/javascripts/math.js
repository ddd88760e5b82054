document$.subscribe(() => renderMathInElement(document.body));
