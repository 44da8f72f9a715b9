package admin

import (
	"context"
	"encoding/binary"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/agent/report"
	"github.com/kvagent/kvagent/pool"
)

// shelf is a tier with n shards of 10 bytes: of space 1, and each third of space 2.
type shelf struct {
	n       int
	hangs   bool // after the last
	deleted int
}

func (s *shelf) StoredAs(fp pool.Fingerprint) pool.Fingerprint { return fp }

func (s *shelf) ListTier(ctx context.Context, _ string, found func(k pool.Key, bytes int64) bool) error {
	for i := range s.n {
		k := pool.Key{Hash: pool.MakeHash(binary.BigEndian.AppendUint32(nil, uint32(i)))}
		if k.Space[0] = 1; i%3 == 0 {
			k.Space[0] = 2
		}
		if !found(k, 10) {
			return nil
		}
	}
	if s.hangs {
		<-ctx.Done()
	}
	return ctx.Err()
}

func (s *shelf) DeleteIn(ctx context.Context, _ string, keys []pool.Key) error {
	s.deleted += len(keys)
	return ctx.Err()
}

func viewShelf(s *shelf, q tierRequest) *tierView {
	first := report.CacheSpace{Space: "01" + strings.Repeat("00", 15), Model: "m", Tenant: "t"}
	return &tierView{
		contents: s, request: &q, within: 20 * time.Millisecond,
		known: map[pool.Fingerprint]report.CacheSpace{{1}: first}, picked: map[pool.Fingerprint]*CacheTierSpace{},
	}
}

func TestTierIsListed(t *testing.T) {
	for name, c := range map[string]struct {
		shelf    shelf
		question tierRequest
		shards   []int64
		complete bool
	}{
		"all":        {shelf{n: 30}, tierRequest{}, []int64{20, 10}, true},
		"by model":   {shelf{n: 30}, tierRequest{filter: cacheFilter{model: "m"}}, []int64{20}, true},
		"by a name":  {shelf{n: 30}, tierRequest{filter: cacheFilter{space: "02"}}, []int64{10}, true},
		"that hangs": {shelf{n: 30, hangs: true}, tierRequest{}, []int64{20, 10}, false},
	} {
		out, err := viewShelf(&c.shelf, c.question).list(t.Context())
		if err != nil || out.Complete != c.complete || len(out.Spaces) != len(c.shards) {
			t.Errorf("%s: %+v, %v", name, out, err)
			continue
		}
		for i, n := range c.shards {
			if s := out.Spaces[i]; s.Shards != n || s.Bytes != 10*n || s.Known != (s.Space[:2] == "01") {
				t.Errorf("%s: space %d is %+v, want %d shards", name, i, s, n)
			}
		}
	}
}

func TestTierIsEmptiedInPieces(t *testing.T) {
	s := &shelf{n: 3*maxTierRemoved/2 + 30_000}
	v := viewShelf(s, tierRequest{filter: cacheFilter{model: "m"}})
	v.within = time.Minute
	out, err := v.remove(t.Context())
	if err != nil || out.Complete || out.Shards != maxTierRemoved || s.deleted != maxTierRemoved {
		t.Errorf("%+v, %v, %d deleted", out, err, s.deleted)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	out, err = v.remove(over)
	if err != nil || out.Complete || out.Shards != 0 {
		t.Errorf("without time: %+v, %v", out, err)
	}
}

func TestTierQuestions(t *testing.T) {
	for text, want := range map[string]string{
		"":                     "tier: not given",
		"tier=disk&space=x":    "hex digits",
		"tier=disk&colour=red": "colour: unknown",
		"tier=disk&model=m":    "",
	} {
		values, err := url.ParseQuery(text)
		check(t, err)
		_, err = parseTierRequest(values)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	for _, err := range []error{pool.ErrUnlisted, pool.ErrNoTier, errNoFilter} {
		if statusOf(err) != http.StatusBadRequest {
			t.Errorf("%v: status %d", err, statusOf(err))
		}
	}
}
