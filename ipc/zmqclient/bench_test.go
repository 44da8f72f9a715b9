package zmqclient

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"github.com/kvagent/kvagent/ipc"
)

// BenchmarkLookup measures receiving, parsing and answering without a handler, against a plain zmq4
// REP that gets the same frames in turn.
func BenchmarkLookup(b *testing.B) {
	for _, form := range []ipc.Form{ipc.FormOwn, ipc.FormUpstream, ipc.FormAscend4, ipc.FormSimple} {
		for _, n := range []int{128, 2048} {
			b.Run(fmt.Sprintf("%v/%d", form, n), func(b *testing.B) { benchForm(b, form, n) })
		}
	}
}

func benchForm(b *testing.B, form ipc.Form, n int) {
	c, dir := testContext(b), socketDir(b)
	s := serveLookups(b, dir, "l", func(*ipc.LookupRequest, time.Time) ipc.LookupReply { return ipc.LookupReply{} })
	stop := serveEcho(b, filepath.Join(dir, "echo"))
	defer stop()
	ours, echo := c.Dial(s.Path()), c.Dial(filepath.Join(dir, "echo"))
	defer ours.Close()
	defer echo.Close()
	var f ipc.Frames
	if err := ipc.AppendRequest(&f, &ipc.LookupRequest{Form: form, Tokens: 1, HashLen: 32,
		Hashes: make([]byte, 32*n)}); err != nil {
		b.Fatal(err)
	}
	var took [2][]time.Duration
	for b.Loop() {
		for i, l := range []*Client{ours, echo} {
			start := time.Now()
			if _, err := l.Exchange(&f, 5*time.Second); err != nil {
				b.Fatal(err)
			}
			took[i] = append(took[i], time.Since(start))
		}
	}
	p50 := func(d []time.Duration) float64 { slices.Sort(d); return float64(d[len(d)/2].Nanoseconds()) / 1e3 }
	a, e := p50(took[0]), p50(took[1])
	b.ReportMetric(a, "p50-us")
	b.ReportMetric(e, "echo-p50-us")
	b.ReportMetric(a/e, "ratio")
}

func serveEcho(b *testing.B, path string) (stop func()) {
	ctx, err := zmq.NewContext()
	if err != nil {
		b.Fatal(err)
	}
	rep, err := ctx.NewSocket(zmq.REP)
	if err != nil {
		b.Fatal(err)
	}
	if err := rep.Bind("ipc://" + path); err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer rep.Close()
		for {
			if _, err := rep.RecvMessageBytes(0); err != nil {
				return
			}
			if _, err := rep.SendBytes(make([]byte, 4), 0); err != nil {
				return
			}
		}
	}()
	return func() {
		ctx.Term()
		<-done
	}
}
