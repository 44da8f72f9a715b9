package page

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Everything that the page and its files name is served with the same policy, and none of them
// names another host.
func TestPageIsWhole(t *testing.T) {
	p := Start(Source{Sample: func() (Point, any) { return Point{}, nil }}, zap.NewNop())
	defer p.Close()
	mux := http.NewServeMux()
	p.Add(mux, false)
	named := regexp.MustCompile(`(?:src|href)="(page/[^"]+)"|from '\./([^']+)'`)
	asked := map[string]bool{}
	var look func(path string)
	look = func(path string) {
		if asked[path] {
			return
		}
		asked[path] = true
		answer := httptest.NewRecorder()
		mux.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
		h := answer.Header()
		if answer.Code != http.StatusOK || h.Get("Content-Security-Policy") != policy ||
			h.Get("X-Content-Type-Options") != "nosniff" || strings.HasPrefix(h.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: %d, %v", path, answer.Code, h)
		}
		if path == "/page/uplot.js" {
			return // not ours
		}
		text := answer.Body.String()
		if strings.Contains(text, "://") || strings.Contains(text, "innerHTML") {
			t.Errorf("%s names another host, or makes HTML of texts", path)
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			if m[1] != "" {
				look("/" + m[1])
			} else {
				look("/page/" + m[2])
			}
		}
	}
	look("/")
	if len(asked) != 8 {
		t.Errorf("the page has %d files: %v", len(asked), asked)
	}
}

// site serves a page over pipes without buffers, in a bubble of synctest.
type site struct {
	t         *testing.T
	page      *Page
	conns     chan net.Conn
	explained atomic.Int64
	panics    atomic.Bool
	closed    bool
}

func serve(t *testing.T) *site {
	s := &site{t: t, conns: make(chan net.Conn)}
	var n uint64 // points
	s.page = Start(Source{
		Sample: func() (Point, any) {
			if s.panics.Load() {
				panic("no sample")
			}
			n++
			return Point{Lookups: n, Tiers: [][2]uint64{}}, map[string]uint64{"version": n}
		},
		Explain: func() (reasons, lookups any) { return s.explained.Add(1), "11c7a9e0" },
	}, zap.NewNop())
	open, mux := http.NewServeMux(), http.NewServeMux()
	s.page.Add(open, false)
	s.page.Add(mux, true)
	mux.Handle("/open/", http.StripPrefix("/open", open))
	server := &http.Server{Handler: mux, ReadTimeout: time.Second, WriteTimeout: time.Second}
	go func() { _ = server.Serve(s) }()
	t.Cleanup(func() {
		if !s.closed {
			s.page.Close()
		}
		if err := server.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// Accept implements net.Listener.
func (s *site) Accept() (net.Conn, error) {
	if c, ok := <-s.conns; ok {
		return c, nil
	}
	return nil, net.ErrClosed
}

// Close implements net.Listener.
func (s *site) Close() error { close(s.conns); return nil }

// Addr implements net.Listener.
func (s *site) Addr() net.Addr { return &net.UnixAddr{} }

// watcher reads a stream.
type watcher struct {
	t    *testing.T
	conn net.Conn
	body *bufio.Reader
	code int
}

func (s *site) watch(path string) *watcher {
	s.t.Helper()
	client, server := net.Pipe()
	s.conns <- server
	request := httptest.NewRequest(http.MethodGet, path, nil)
	if err := request.Write(client); err != nil {
		s.t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(client), request)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _, _ = client.Close(), resp.Body.Close() })
	return &watcher{s.t, client, bufio.NewReader(resp.Body), resp.StatusCode}
}

// received is a frame as a browser gets it.
type received struct {
	Points                   []Point
	Status, Reasons, Lookups json.RawMessage
}

// next returns the next frame.
func (w *watcher) next() (f received) {
	w.t.Helper()
	for {
		line, err := w.body.ReadBytes('\n')
		if err != nil {
			w.t.Fatal(err)
		}
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
			if err := json.Unmarshal(data, &f); err != nil {
				w.t.Fatal(err)
			}
			return f
		}
	}
}

// A page that is opened has the last hour at once, and then each point with the latest status.
func TestStreamHasTheLastHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		time.Sleep(2*time.Hour + time.Second)
		w := s.watch("/page/stream")
		first := w.next()
		if len(first.Points) != MaxPoints {
			t.Fatalf("%d points, want those of an hour", len(first.Points))
		}
		for i, p := range first.Points {
			if p.Lookups != uint64(3601-MaxPoints+i+1) || i > 0 && p.At-first.Points[i-1].At != every.Milliseconds() {
				t.Fatalf("point %d: %+v after %+v", i, p, first.Points[max(i-1, 0)])
			}
		}
		for i := range uint64(3) {
			f := w.next()
			if len(f.Points) != 1 || f.Points[0].Lookups != 3602+i || string(f.Status) !=
				`{"version":`+string(must(json.Marshal(3602+i)))+`}` {
				t.Errorf("%d points, %+v, status %s", len(f.Points), f.Points, f.Status)
			}
		}
	})
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// Hashes are only where they may be shown. Nobody explains while nobody watches, and ten watchers
// cost no more than one.
func TestExplanations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		time.Sleep(time.Hour)
		if n := s.explained.Load(); n != 0 {
			t.Errorf("explained %d times for nobody", n)
		}
		var all []*watcher
		for range 5 {
			all = append(all, s.watch("/page/stream"), s.watch("/open/page/stream"))
		}
		for range 11 { // frames: 20 s
			for i, w := range all {
				f := w.next()
				if len(f.Reasons) == 0 || (len(f.Lookups) > 0) != (i%2 == 0) {
					t.Errorf("stream %d: reasons %s, look-ups %s", i, f.Reasons, f.Lookups)
				}
			}
		}
		if n := s.explained.Load(); n > 3 {
			t.Errorf("explained %d times in 20 s, want every 10 s", n)
		}
	})
}

// A client that reads nothing is disconnected after 10 s. One that is slow is sent fewer frames,
// and all points. Neither keeps another one waiting.
func TestSlowClients(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		const path = "/page/stream"
		stuck, slow, quick := s.watch(path), s.watch(path), s.watch(path)
		begin := time.Now()
		var points []Point
		for i := range 40 {
			if i%3 == 0 && i > 0 {
				points = append(points, slow.next().Points...)
			}
			if quick.next(); time.Since(begin) > time.Duration(i)*every {
				t.Fatalf("frame %d came after %v", i, time.Since(begin))
			}
		}
		for i, p := range points {
			if p.Lookups != uint64(i+1) {
				t.Fatalf("point %d of a slow client is number %d", i, p.Lookups)
			}
		}
		if len(points) < 30 {
			t.Errorf("a slow client has %d points of 40", len(points))
		}
		if _, err := io.Copy(io.Discard, stuck.conn); err != nil {
			t.Error(err)
		}
		if n := len(s.page.streams); n != 2 {
			t.Errorf("%d streams are open, want the slow and the quick one", n)
		}
	})
}

// One stream too many is refused, and has its place when another one has gone.
func TestStreamsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		var all []*watcher
		for range MaxStreams {
			all = append(all, s.watch("/page/stream"))
		}
		if w := s.watch("/open/page/stream"); w.code != http.StatusServiceUnavailable {
			t.Errorf("one too many: %d", w.code)
		}
		_ = all[3].conn.Close()
		synctest.Wait()
		if w := s.watch("/page/stream"); w.code != http.StatusOK {
			t.Errorf("after one has gone: %d", w.code)
		}
	})
}

// A panic while the agent is sampled costs points, and ends nothing.
func TestPanicCostsAPoint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		w := s.watch("/page/stream")
		w.next()
		s.panics.Store(true)
		time.Sleep(5 * every)
		s.panics.Store(false)
		if f := w.next(); len(f.Points) != 1 || f.Points[0].Lookups != 2 {
			t.Errorf("%+v after panics", f.Points)
		}
	})
}

// The end of the page ends its streams.
func TestCloseEndsStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		w := s.watch("/page/stream")
		w.next()
		s.closed = true
		s.page.Close()
		if left, err := io.ReadAll(w.body); err != nil || len(left) > 1 { // the line after the frame
			t.Errorf("%q, %v", left, err)
		}
	})
}
