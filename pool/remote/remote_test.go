package remote

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

func TestCondition(t *testing.T) {
	var onState []string
	c := NewCondition(Lost, func(from, to State,
		reason error) {
		onState = append(onState, fmt.Sprint(from, " ", to, " ", reason))
	})
	why := errors.New("why")
	c.Set(Lost, why) // as it was: not called
	c.Set(OK, nil)
	c.Set(Full, why)
	c.Set(Slow, why)
	if got := strings.Join(onState, ", "); got != "lost ok <nil>, ok full why, full slow why" || c.State() != Slow {
		t.Errorf("onState %q, state %v", got, c.State())
	}
	NewCondition(OK, nil).Set(Lost, why)
}

func TestNames(t *testing.T) {
	k := pool.Key{Hash: pool.MakeHash([]byte{1, 2})}
	if got := Name("p:", &k); got != "p:"+k.Text() || !Valid(&k) {
		t.Errorf("name %q, valid %v", got, Valid(&k))
	}
	if Valid(&pool.Key{}) || Valid(&pool.Key{Hash: pool.Hash{Len: pool.MaxHashLen + 1}}) {
		t.Error("a key without a hash, or with one too long, is valid")
	}
}

func TestOptions(t *testing.T) {
	const d = time.Second
	if err := Between("redis", "Silence", d, time.Millisecond, time.Second); err != nil {
		t.Error(err)
	}
	if err := Between("redis", "Silence", 2*d, time.Millisecond, time.Second); err == nil ||
		err.Error() != "redis: Silence is 2s, allowed: 1ms to 1s" {
		t.Error(err)
	}
	if err := Between("s3", "Concurrency", 0, 1, 5); err == nil {
		t.Error("below the range")
	}
}
