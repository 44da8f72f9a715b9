package dram

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// BenchmarkReset reports the time of a reset, the time of the sweep after it, and the longest
// look-up meanwhile.
func BenchmarkReset(b *testing.B) {
	for _, n := range []int{10_000, 1_000_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var asked, swept, longest time.Duration
			for b.Loop() {
				b.StopTimer()
				p := filled(b, n)
				h := randomChain(nil, 1, benchChainLen)
				b.StartTimer()
				start := time.Now()
				if _, err := p.ResetSpace(0); err != nil {
					b.Fatal(err)
				}
				asked += time.Since(start)
				done := make(chan struct{})
				go func() {
					defer close(done)
					p.Sweep()
				}()
				longest = max(longest, longestPrefix(p, h, done))
				swept += time.Since(start)
			}
			b.ReportMetric(float64(asked.Nanoseconds())/float64(b.N), "ns/reset")
			b.ReportMetric(float64(swept.Microseconds())/float64(b.N)/1e3, "ms/sweep")
			b.ReportMetric(float64(longest.Microseconds()), "us/longest-look-up")
		})
	}
}

// longestPrefix asks until done is closed.
func longestPrefix(p *Pool, h pool.Hashes, done <-chan struct{}) (longest time.Duration) {
	for {
		select {
		case <-done:
			return longest
		default:
		}
		start := time.Now()
		p.Prefix(0, 0, h)
		longest = max(longest, time.Since(start))
	}
}
