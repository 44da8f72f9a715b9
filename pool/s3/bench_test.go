package s3

import (
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/servertest"
)

// 16 blocks of 1 MiB.
func BenchmarkPutGet(b *testing.B) {
	s := open(b, options(servertest.S3(b, bucket)))
	items := pooltest.Blocks(0, 16, 1<<20)
	keys := make([]pool.Key, len(items))
	for i := range items {
		keys[i] = items[i].Key
	}
	pooltest.Put(b, s, pool.OK, items...)
	b.Run("put", func(b *testing.B) {
		b.SetBytes(16 << 20)
		b.ReportAllocs()
		for b.Loop() {
			b.StopTimer()
			if err := s.Delete(b.Context(), keys); err != nil {
				b.Fatal(err)
			}
			b.StartTimer()
			if err := s.Put(b.Context(), items); err != nil || items[0].Status != pool.OK {
				b.Fatal(items[0].Status, err)
			}
		}
	})
	b.Run("get", func(b *testing.B) {
		out := pooltest.Empty(items)
		b.SetBytes(16 << 20)
		b.ReportAllocs()
		for b.Loop() {
			if err := s.Get(b.Context(), out); err != nil || out[0].Status != pool.OK {
				b.Fatal(out[0].Status, err)
			}
		}
	})
}

// Exists of 64 keys: one question.
func BenchmarkExists(b *testing.B) {
	s := open(b, options(servertest.S3(b, bucket)))
	items := pooltest.Blocks(0, 64, 1000)
	pooltest.Put(b, s, pool.OK, items...)
	keys, status := make([]pool.Key, len(items)), make([]pool.Status, len(items))
	for i := range items {
		keys[i] = items[i].Key
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Exists(b.Context(), keys, status); err != nil || status[0] != pool.OK {
			b.Fatal(status[0], err)
		}
	}
}
