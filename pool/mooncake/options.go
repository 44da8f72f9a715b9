package mooncake

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"
	"time"

	"github.com/kvagent/kvagent/pool/remote"
)

// Memory is shared with the helper and may hold values. The zero value is no memory.
type Memory struct {
	Base []byte // mapped by the caller, at least until Close has returned
	FD   int    // a memfd of at least len(Base) bytes, which the helper maps
}

// Options of a store. Fields left zero take their default, if one is named.
type Options struct {
	Master   string // host:port of mooncake_master, or etcd://host:port;host:port of several of which one leads
	Metadata string // "P2PHANDSHAKE" (the default), or the URL of a metadata server; may hold a password
	Protocol string // "tcp" (the default) or "rdma"
	Devices  string // rdma: names of devices, separated by commas
	// Host is the name or address by which other nodes reach this one; default: the address from
	// which this node reaches the master.
	Host string
	// Segment is the memory that this node adds to the shared store, bytes, 0 to MaxSegment. It is
	// in the helper, and its contents are lost with the helper.
	Segment     int64
	LocalBuffer int64  // the client's own memory, bytes; default 16 MiB
	Replicas    int    // copies of a value, 1 to MaxReplicas; default 1
	Prefix      string // of every key, at most MaxPrefix bytes; default "kvagent:"

	// Arena is memory in which values are read and written in place, also after a call that ends
	// with pool.InUse. Other values are copied.
	Arena Memory
	// Bounce is the memory for copied values, bytes; default 64 MiB. Each
	// of Concurrency requests has an equal share. A larger value outside the arena is not stored.
	Bounce      int64
	Concurrency int // concurrent requests for values, and as many questions, 1 to MaxConcurrency; default 8

	Python string   // interpreter of the helper; default "python3"
	Env    []string // of the helper, in addition to this process's: NAME=VALUE
	// SetupWithin bounds the start and connection of a helper; default 20 s.
	SetupWithin time.Duration
	// RPCWithin bounds one answer of the master; default 500 ms.
	RPCWithin time.Duration
	// Silence is how long a helper may work on one request before it is killed; default 10 s.
	Silence time.Duration
	// FailingFor is how long every transfer of a helper may fail, and at least failingRequests of
	// them, before the helper is replaced, 100 ms to 1 h; default 15 s. It should be longer than
	// the master's --client_ttl, since transfers from a dead node fail until then.
	FailingFor time.Duration
	leave      time.Duration // for a helper with a segment to deregister it; else 0
	// OnState is called with changes of the store's state; it must not call the store. May be nil.
	OnState remote.OnState
}

// Limits of options.
const (
	MaxSegment     = 16 << 40
	MaxReplicas    = 16
	MaxPrefix      = 128
	MaxConcurrency = 64
	MaxText        = 1024 // bytes of an address, a list of devices or a name
)

// p2p is the value of Metadata for operation without a metadata server.
const p2p = "P2PHANDSHAKE"

func (o *Options) complete() error {
	o.Metadata = cmp.Or(o.Metadata, p2p)
	o.Protocol = cmp.Or(o.Protocol, "tcp")
	o.LocalBuffer = cmp.Or(o.LocalBuffer, 16<<20)
	o.Replicas = cmp.Or(o.Replicas, 1)
	o.Prefix = cmp.Or(o.Prefix, "kvagent:")
	o.Bounce = cmp.Or(o.Bounce, 64<<20)
	o.Concurrency = cmp.Or(o.Concurrency, 8)
	o.Python = cmp.Or(o.Python, "python3")
	o.SetupWithin = cmp.Or(o.SetupWithin, 20*time.Second)
	o.RPCWithin = cmp.Or(o.RPCWithin, 500*time.Millisecond)
	o.Silence = cmp.Or(o.Silence, 10*time.Second)
	o.FailingFor = cmp.Or(o.FailingFor, 15*time.Second)
	if o.Segment > 0 {
		o.leave = cmp.Or(o.leave, leaveWithin)
	}
	err := errors.Join(
		o.checkAddresses(),
		remote.Between("mooncake", "Prefix", len(o.Prefix), 1, MaxPrefix),
	)
	if err == nil && o.share() < valueAlign {
		err = fmt.Errorf("mooncake: Bounce is %d bytes for %d concurrent requests, allowed: at least %d for each",
			o.Bounce, o.Concurrency, valueAlign)
	}
	return err
}

// share returns the bounce memory of one request in bytes.
func (o *Options) share() int64 { return o.Bounce / int64(o.Concurrency) &^ (valueAlign - 1) }

var textual = regexp.MustCompile(`^[!-~]*$`)

func (o *Options) checkAddresses() error {
	for name, text := range map[string]string{
		"Master": o.Master, "Metadata": o.Metadata, "Host": o.Host, "Prefix": o.Prefix,
	} {
		if len(text) > MaxText || !textual.MatchString(text) {
			return fmt.Errorf("mooncake: %s has %d bytes, allowed: at most %d, printable, no blanks", name, len(text),
				MaxText)
		}
	}
	if err := checkDevices(o.Protocol, o.Devices); err != nil || strings.Contains(o.Master, "://") {
		return err
	}
	if host, port, err := net.SplitHostPort(o.Master); err != nil || host == "" || port == "" {
		return fmt.Errorf("mooncake: Master is %q, allowed: host:port, or etcd://host:port;host:port", o.Master)
	}
	return nil
}

func checkDevices(protocol, devices string) error {
	switch {
	case protocol != "tcp" && protocol != "rdma":
		return fmt.Errorf("mooncake: Protocol is %q, allowed: tcp, rdma", protocol)
	case protocol == "tcp" && devices != "":
		return fmt.Errorf("mooncake: Devices is %q, allowed: none with tcp", devices)
	case len(devices) > MaxText || !textual.MatchString(devices):
		return fmt.Errorf("mooncake: Devices has %d bytes, allowed: at most %d, printable, no blanks", len(devices),
			MaxText)
	}
	return nil
}
