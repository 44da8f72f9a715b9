package ipc

import (
	"fmt"
	"testing"
)

// Parsing alone, in memory.
func BenchmarkParse(b *testing.B) {
	for _, form := range []Form{FormOwn, FormUpstream, FormAscend4, FormSimple} {
		b.Run(fmt.Sprintf("%v/2048", form), func(b *testing.B) {
			var f Frames
			if err := appendRequest(&f, &LookupRequest{Form: form, Tokens: 1, HashLen: 32,
				Hashes: make([]byte, 32*2048)}); err != nil {
				b.Fatal(err)
			}
			var p Parser
			var r LookupRequest
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Parse(&f, &r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
