package dram

import (
	"context"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

func TestPutGet(t *testing.T) {
	p, err := Open(Options{Bytes: 64 << 10, SlabBytes: 8 << 10})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.OpenSpace(pool.Spec{Shards: 1, Groups: []pool.Group{{BlockTokens: 16, ShardBytes: []uint32{1000}}}}); err != nil {
		t.Fatal(err)
	}
	s := p.Store()
	for i := range 100 {
		key := pool.Key{Hash: pool.MakeHash([]byte{byte(i), 1})}
		put := []pool.Item{{Key: key, Data: make([]byte, 1000)}}
		put[0].Data[7] = byte(i)
		if err := s.Put(context.Background(), put); err != nil || put[0].Status != pool.OK {
			t.Fatal(i, err, put[0].Status)
		}
		get := []pool.Item{{Key: key, Data: make([]byte, 1000)}}
		if err := s.Get(context.Background(), get); err != nil || get[0].Status != pool.OK || get[0].Data[7] != byte(i) {
			t.Fatal(i, err, get[0].Status)
		}
	}
	if st := p.Stats(); st.Entries != 64 || st.Evicted != 36 {
		t.Fatalf("%+v", st)
	}
}
