package tierspec

import (
	"errors"
	"net/url"
	"strings"
	"time"

	"github.com/kvagent/kvagent/pool/mooncake"
)

// readMooncakeTier reads mooncake://MASTER:PORT. Several masters of which one leads are given by master=etcd://HOST:PORT;HOST:PORT instead.
func readMooncakeTier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	r := mooncake.Options{
		Master: o.text("master", u.Host), Protocol: o.choice("protocol", "tcp", "tcp", "rdma"), Devices: o.text("devices", ""),
		Host: o.text("host", ""), Prefix: o.text("prefix", ""), Python: o.text("python", ""),
		Segment:     o.size("segment", 0, mooncake.MaxSegment),
		LocalBuffer: o.size("local-buffer", mooncake.MinLocalBuffer, mooncake.MaxLocalBuffer),
		Bounce:      o.size("bounce", mooncake.MinBounce, mooncake.MaxBounce),
		Replicas:    o.count("replicas", mooncake.MaxReplicas), Concurrency: o.count("concurrency", mooncake.MaxConcurrency),
		SoftPin:     o.duration("soft-pin", 0, mooncake.MaxSoftPin),
		SetupWithin: o.duration("setup-within", time.Second, 5*time.Minute),
		RPCWithin:   o.duration("rpc-within", 50*time.Millisecond, time.Minute),
		Silence:     o.duration("silence", 100*time.Millisecond, 10*time.Minute),
		FailingFor:  o.duration("failing-for", 100*time.Millisecond, time.Hour),
	}
	if preferred := o.text("preferred", ""); preferred != "" {
		r.Preferred = strings.Split(preferred, ",")
	}
	var err error
	r.Metadata, err = o.secret("metadata")
	o.fail(err)
	if plain := o.text("metadata", ""); plain != "" {
		r.Metadata = plain
		if m, err := url.Parse(plain); err != nil || m.User != nil {
			o.fail(errors.New("metadata: has a user or is no URL, allowed: metadata-file or metadata-env for one with a password"))
		}
	}
	if password, err := o.secret("redis-password"); err != nil {
		o.fail(err)
	} else if password != "" {
		r.Env = append(r.Env, "MC_REDIS_PASSWORD="+password)
	}
	return func(n *Needs) (Opened, error) {
		r.OnState = n.told("mooncake")
		base, fd := n.Staging.Memory()
		r.Arena = mooncake.Memory{Base: base, FD: fd}
		s, err := mooncake.Open(r)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Close: s.Close}, nil
	}
}
