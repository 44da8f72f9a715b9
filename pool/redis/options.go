package redis

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/rueidis"

	"github.com/kvagent/kvagent/pool/remote"
)

// Mode is the kind of deployment.
type Mode uint8

// The modes.
const (
	Single   Mode = iota // one server, with or without replicas
	Cluster              // Redis Cluster or Valkey Cluster: any of its nodes
	Sentinel             // sentinels that know where the master is
)

// Options of a store. Fields left zero take their default, if one is named.
type Options struct {
	Mode       Mode
	Addresses  []string // host:port of the servers, the cluster's nodes, or the sentinels
	MasterName string   // Sentinel: the sentinels' name for the master
	Database   int      // Single and Sentinel: 0 to 65535
	Username   string   // of the ACL; empty: the default user
	Password   string
	TLS        *tls.Config // nil: none
	Prefix     string      // of every key, at most MaxPrefix bytes; default "kvagent:"
	// TTL is how long after it was written a block expires, MinTTL to MaxTTL; default DefaultTTL. A
	// use does not prolong it. Markers of resets do not expire.
	TTL time.Duration
	// ChunkBytes bounds the bytes of one value at the server, 64 KiB to 512 MiB; default 1 MiB. A
	// server serves no other client while it reads or writes one.
	ChunkBytes  int
	Concurrency int           // concurrent pipelines; default 8
	BatchBytes  int64         // data of one pipeline; default 16 MiB
	DialTimeout time.Duration // default 1 s
	// Silence is how long a server may leave a command unanswered before its connection is
	// replaced; default 5 s. A call ends with its context in any case.
	Silence time.Duration
	// OnState is called with changes of the store's state; it must not call the store. May be nil.
	OnState remote.OnState
}

// Limits of options.
const (
	MaxPrefix     = 128
	MinChunkBytes = 64 << 10
	MaxChunkBytes = 512 << 20 // the largest Redis string
	MinTTL        = time.Second
	DefaultTTL    = 7 * 24 * time.Hour
	MaxTTL        = 10 * 365 * 24 * time.Hour
	maxAddresses  = 64
)

func (o *Options) complete() error {
	remote.Default(&o.Prefix, "kvagent:")
	remote.Default(&o.TTL, DefaultTTL)
	remote.Default(&o.ChunkBytes, 1<<20)
	remote.Default(&o.Concurrency, 8)
	remote.Default(&o.BatchBytes, 16<<20)
	remote.Default(&o.DialTimeout, time.Second)
	remote.Default(&o.Silence, 5*time.Second)
	return errors.Join(
		o.checkAddresses(),
		remote.Between("redis", "Database", o.Database, 0, 65535),
		remote.Between("redis", "Prefix", len(o.Prefix), 1, MaxPrefix),
		remote.Between("redis", "TTL", o.TTL, MinTTL, MaxTTL),
	)
}

func (o *Options) checkAddresses() error {
	if len(o.Addresses) == 0 || len(o.Addresses) > maxAddresses {
		return fmt.Errorf("redis: %d Addresses, allowed: 1 to %d", len(o.Addresses), maxAddresses)
	}
	for _, a := range o.Addresses {
		if host, port, err := net.SplitHostPort(a); err != nil || host == "" || port == "" {
			return fmt.Errorf("redis: Addresses: %q, allowed: host:port", a)
		}
	}
	switch {
	case o.Mode > Sentinel:
		return fmt.Errorf("redis: Mode is %d, allowed: 0 to %d", o.Mode, Sentinel)
	case (o.Mode == Sentinel) != (o.MasterName != ""):
		return fmt.Errorf("redis: MasterName is %q, allowed: a name with Sentinel, else none", o.MasterName)
	case o.Mode == Cluster && o.Database != 0:
		return fmt.Errorf("redis: Database is %d, allowed: 0 in a cluster", o.Database)
	case strings.ContainsAny(o.Prefix, "{}"):
		return fmt.Errorf("redis: Prefix is %q, allowed: one without braces, "+
			"which would put all keys in one slot of a cluster", o.Prefix)
	}
	return nil
}

// client returns the client library's options, and the connections that a client of them opens: no
// cache, and no retries, since they would not be counted.
func (o *Options) client() (rueidis.ClientOption, *connections) {
	all := &connections{
		max: maxConnections + o.Concurrency, redirects: o.Mode == Cluster, open: map[*bounded]bool{},
	}
	c := rueidis.ClientOption{
		InitAddress: o.Addresses, SelectDB: o.Database, ForceSingleClient: o.Mode != Cluster,
		Username: o.Username, Password: o.Password, TLSConfig: o.TLS, ClientName: "kvagent",
		DialCtxFn:          all.dial,
		ReadBufferEachConn: 4 << 10, // besides the one of each connection
		Dialer:             net.Dialer{Timeout: o.DialTimeout, KeepAlive: o.Silence},
		ConnWriteTimeout:   o.Silence,
		DisableCache:       true,
		DisableRetry:       true,
		AlwaysPipelining:   true,
	}
	if o.Mode == Cluster { // of each node
		c.WriteBufferEachConn, c.RingScaleEachConn = 32<<10, 8
	}
	return c, all
}
