package page

import (
	"embed"
	"net/http"

	"github.com/kvagent/kvagent/third_party/uplot"
)

//go:embed page.html page.css *.js
var files embed.FS

// policy lets the page load its own files and read its stream, and nothing else. No page may frame
// it.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Add adds the page, which is at /, and its files and its stream, which are below /page/. The
// stream has look-ups and their hashes only if hashes is set.
func (p *Page) Add(mux *http.ServeMux, hashes bool) {
	const html, css, script = "text/html; charset=utf-8", "text/css; charset=utf-8", "text/javascript; charset=utf-8"
	add(mux, "/{$}", html, own("page.html"))
	add(mux, "/page/page.css", css, own("page.css"))
	for _, name := range []string{"page.js", "charts.js", "tables.js", "format.js"} {
		add(mux, "/page/"+name, script, own(name))
	}
	add(mux, "/page/uplot.js", script, uplot.Script)
	add(mux, "/page/uplot.css", css, uplot.Style)
	mux.HandleFunc("GET /page/stream", func(rw http.ResponseWriter, r *http.Request) { p.stream(rw, r, hashes) })
}

// own returns one of the embedded files.
func own(name string) []byte {
	text, err := files.ReadFile(name)
	if err != nil {
		panic(err) // the build embeds it
	}
	return text
}

// add serves one file. No browser keeps it, so a page is never of two versions of the agent.
func add(mux *http.ServeMux, pattern, kind string, text []byte) {
	mux.HandleFunc("GET "+pattern, func(rw http.ResponseWriter, _ *http.Request) {
		h := rw.Header()
		h.Set("Content-Type", kind)
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		_, _ = rw.Write(text) // an error means that the client disconnected
	})
}
