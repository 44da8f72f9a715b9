// Package page is the agent's web page: what the agent does now, and charts of the last hour. It
// changes nothing, and everything that it needs is in the binary.
package page

import (
	"embed"
	"encoding/json"
	"net/http"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/third_party/uplot"
)

// Limits of the page.
const (
	MaxPoints    = 1800             // an hour of them; beyond, the oldest is dropped
	MaxStreams   = 16               // at once; a further one is refused
	every        = 2 * time.Second  // between two points
	explainEvery = 10 * time.Second // at most, while somebody watches
	stalled      = 10 * time.Second // after which a client that reads nothing is disconnected
)

// Point is what the charts need of one moment. Counts are since the agent's start.
type Point struct {
	At          int64  `json:"at"` // Unix ms, set by the page; it grows from point to point
	Lookups     uint64 `json:"lookups"`
	TokensAsked uint64 `json:"tokens_asked"`
	TokensFound uint64 `json:"tokens_found"`
	Blocks      uint64 `json:"blocks"` // looked up in memory; 0: the policy does not count them
	BlocksHit   uint64 `json:"blocks_hit"`
	// about: that a pool which evicts nothing would have hit
	BlocksUnlimited uint64      `json:"blocks_unlimited"`
	Loaded          uint64      `json:"loaded"`     // bytes
	Saved           uint64      `json:"saved"`      // bytes
	Tiers           [][2]uint64 `json:"tiers"`      // bytes read and written, in the order of the status
	SlowestUS       float64     `json:"slowest_us"` // look-up since the point before; 0: none
	Engines         int         `json:"engines"`
	Complete        int         `json:"complete"` // engines whose ranks are all registered
	Used            int64       `json:"used"`     // bytes of the pool
	Pinned          int64       `json:"pinned"`
	Capacity        int64       `json:"capacity"`
}

// Source is the agent as the page reads it. Its functions may be called from any goroutine until
// Close returns.
type Source struct {
	// Sample returns a point, and the status that tables show. It is called every two seconds.
	Sample func() (Point, any)
	// Explain returns which reasons cost how many tokens, and the last look-ups, which name hashes.
	// It is called only while somebody watches; nil: nothing is remembered.
	Explain func() (reasons, lookups any)
}

// Page samples an agent, and serves the samples.
type Page struct {
	source  Source
	log     *zap.Logger
	start   time.Time
	stop    chan struct{}
	ended   sync.WaitGroup
	streams chan struct{} // a place for each

	mu     sync.Mutex // guards the following, and is held for no call of source
	points []Point    // a ring from MaxPoints on
	made   uint64     // points ever
	status any        // of the last point
	next   chan struct{}

	shown shown
}

// shown has the explanations that all streams share. The first one that needs them makes them.
type shown struct {
	mu               sync.Mutex
	explained        time.Time
	reasons, lookups any
}

// Start begins to sample, until Close.
func Start(source Source, log *zap.Logger) *Page {
	p := &Page{
		source: source, log: log, start: time.Now(), stop: make(chan struct{}), next: make(chan struct{}),
		streams: make(chan struct{}, MaxStreams),
	}
	p.ended.Go(p.run)
	return p
}

// Close ends the sampling and the streams. It may not be called twice.
func (p *Page) Close() {
	close(p.stop)
	p.ended.Wait()
}

func (p *Page) run() {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		p.sample()
		select {
		case <-ticker.C:
		case <-p.stop:
			return
		}
	}
}

// sample adds a point. A panic of the source costs the point: in a request, it would end the
// request.
func (p *Page) sample() {
	defer func() {
		if v := recover(); v != nil {
			p.log.Error("no point for the page", zap.Any("panic", v), zap.Stack("stack"))
		}
	}()
	point, status := p.source.Sample()
	// By the monotonic clock: the wall clock may be put back.
	point.At = p.start.Add(time.Since(p.start)).UnixMilli()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.points) < MaxPoints {
		p.points = append(p.points, point)
	} else {
		p.points[p.made%MaxPoints] = point
	}
	p.made++
	p.status = status
	close(p.next)
	p.next = make(chan struct{})
}

// since returns the points after the first sent ones, as far as they are kept, how many there were
// ever, and what is closed with the next one.
func (p *Page) since(sent uint64) (points []Point, made uint64, status any, next <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := max(sent, p.made-uint64(len(p.points))); i < p.made; i++ {
		points = append(points, p.points[i%MaxPoints])
	}
	return points, p.made, p.status, p.next
}

// frame is one event of a stream.
type frame struct {
	Points  []Point `json:"points"` // since the frame before; of the first one, all
	Status  any     `json:"status"`
	Reasons any     `json:"reasons"`           // null: nothing is remembered
	Lookups any     `json:"lookups,omitempty"` // only for those who may see hashes
}

// explain returns why look-ups missed, which is found out anew now and then.
func (p *Page) explain() (reasons, lookups any) {
	s := &p.shown
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.source.Explain != nil && time.Since(s.explained) >= explainEvery {
		s.reasons, s.lookups = p.source.Explain()
		s.explained = time.Now()
	}
	return s.reasons, s.lookups
}

// stream serves GET /page/stream as server-sent events: a frame at once, and one for each point.
// Nothing waits for a client: one that is slow is sent fewer frames, with all points.
func (p *Page) stream(rw http.ResponseWriter, r *http.Request, hashes bool) {
	select {
	case p.streams <- struct{}{}:
		defer func() { <-p.streams }()
	default:
		http.Error(rw, "too many pages are open, allowed: 16 at once", http.StatusServiceUnavailable)
		return
	}
	rc := http.NewResponseController(rw)
	if err := rc.SetReadDeadline(time.Time{}); err != nil { // else it ends with the server's limit
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "text/event-stream")
	rw.Header().Set("Cache-Control", "no-store")
	rw.Header().Set("X-Content-Type-Options", "nosniff")
	for sent := uint64(0); ; {
		points, made, status, next := p.since(sent)
		if made > sent {
			f := frame{Points: points, Status: status}
			if f.Reasons, f.Lookups = p.explain(); !hashes {
				f.Lookups = nil
			}
			if p.write(rw, rc, &f) != nil {
				return // the client has gone, or stalled
			}
			sent = made
		}
		select {
		case <-next:
		case <-r.Context().Done():
			return
		case <-p.stop:
			return
		}
	}
}

// write sends a frame, and waits until the client has taken it in.
func (p *Page) write(rw http.ResponseWriter, rc *http.ResponseController, f *frame) error {
	text, err := json.Marshal(f)
	if err != nil {
		p.log.Error("no frame for the page", zap.Error(err))
		return err
	}
	if err := rc.SetWriteDeadline(time.Now().Add(stalled)); err != nil {
		return err
	}
	for _, part := range [][]byte{[]byte("data: "), text, []byte("\n\n")} {
		if _, err := rw.Write(part); err != nil {
			return err
		}
	}
	return rc.Flush()
}

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
