package ipc

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// BenchmarkLookupBesideLibzmq asks a server of ours and, in turn, a plain REP socket of libzmq that
// sends a reply of the same size. It reports both medians, and the ratio: below 1 ours takes less
// than the least that a round trip through libzmq costs. Client and servers share a process, which
// saves ours more than libzmq.
func BenchmarkLookupBesideLibzmq(b *testing.B) {
	for _, hashes := range []int{1, 128, 2048} {
		b.Run(fmt.Sprint(hashes, "hashes"), func(b *testing.B) {
			dir := socketDir(b)
			ours := DialLookup(serveLookups(b, dir, "lookup", echoHandler).Path())
			defer ours.Close()
			r := LookupRequest{Form: FormOwn, HashLen: 32, Tokens: 1, Hashes: make([]byte, 32*hashes)}
			var f Frames
			if err := appendRequest(&f, &r); err != nil {
				b.Fatal(err)
			}
			reply := AppendReply(nil, &r, echoHandler(&r, time.Time{}))
			echo, err := testZMQ(b).NewSocket(zmq.REP)
			if err != nil {
				b.Fatal(err)
			}
			path, over := filepath.Join(dir, "echo"), make(chan struct{})
			if err := echo.Bind("ipc://" + path); err != nil {
				b.Fatal(err)
			}
			theirs := DialLookup(path)
			defer func() {
				_, _ = theirs.Exchange(framesOf([][]byte{nil}), testTimeout) // an empty one ends it
				theirs.Close()
				<-over
			}()
			go func() {
				defer close(over)
				defer echo.Close()
				for {
					asked, err := echo.RecvMessageBytes(0)
					if err == nil {
						_, err = echo.SendBytes(reply, 0)
					}
					if err != nil || len(asked[0]) == 0 {
						return
					}
				}
			}()
			var took [2][]float64
			for b.Loop() {
				for i, c := range []*LookupClient{ours, theirs} {
					began := time.Now()
					if _, err := c.Exchange(&f, testTimeout); err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], float64(time.Since(began).Microseconds()))
				}
			}
			var p50 [2]float64
			for i, all := range took {
				slices.Sort(all)
				p50[i] = all[len(all)/2]
			}
			b.ReportMetric(p50[0], "ours-p50-us")
			b.ReportMetric(p50[1], "libzmq-p50-us")
			b.ReportMetric(p50[0]/p50[1], "of-libzmq")
		})
	}
}
