package tierspec

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
	"github.com/kvagent/kvagent/pool/mooncake"
	"github.com/kvagent/kvagent/pool/redis"
	"github.com/kvagent/kvagent/pool/remote"
	"github.com/kvagent/kvagent/pool/s3"
	"github.com/kvagent/kvagent/pool/tier/transit"
	"github.com/kvagent/kvagent/secret"
)

// Opened is a store that was opened from a spec.
type Opened struct {
	Store pool.Store
	Local bool // its Exists answers from memory
	Close func() error
}

// Needs is the input of an opener.
type Needs struct {
	Spec    *Spec
	Staging *transit.Staging // a store in another process may register it
	Log     *zap.Logger
}

// Limits of what a server's changes of state log: lines a minute, and bytes of the reason in each.
const (
	maxChanges = 20
	maxReason  = 1 << 10
)

// onState returns a function that logs a store's changes of state.
func (n *Needs) onState(store string) remote.OnState {
	log := n.Log.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(c, time.Minute, maxChanges, 0)
	}))
	return func(from, to remote.State, reason error) {
		why := zap.Skip()
		if reason != nil {
			text := reason.Error()
			why = zap.String("error", text[:min(len(text), maxReason)])
		}
		log.Warn(store, zap.Stringer("from", from), zap.Stringer("to", to), why)
	}
}

// SchemeDisk is the scheme of the node's disks.
const SchemeDisk = "disk"

// readDiskTier reads disk:DIR?capacity=SIZE. dirs=DIR,DIR adds directories of the same capacity.
func readDiskTier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	capacity := o.size("capacity", disk.MinSegments*disk.MinSegmentBytes, disk.MaxDirBytes)
	if capacity == 0 {
		o.fail(errors.New("capacity must be given: the bytes of disk it may use in each directory"))
	}
	d := disk.Options{}
	dirs := []string{u.Path}
	if more := o.text("dirs", ""); more != "" {
		dirs = append(dirs, strings.Split(more, ",")...)
	}
	for _, dir := range dirs {
		d.Dirs = append(d.Dirs, disk.Dir{Path: dir, Bytes: capacity})
	}
	return func(n *Needs) (Opened, error) {
		d.OnState = func(path string, from, to disk.State, reason error) {
			n.Log.Warn("disk", zap.String("dir", path), zap.Stringer("from", from), zap.Stringer("to", to),
				zap.Error(reason))
		}
		s, err := disk.Open(d)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Local: true, Close: s.Close}, nil
	}
}

// readS3Tier reads s3://BUCKET[/PREFIX]. Without keys, requests are signed with those of the
// environment, the AWS credentials file or the machine's role.
func readS3Tier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	r := s3.Options{
		Bucket: u.Host, Endpoint: o.text("endpoint", ""), Region: o.text("region", ""),
		Insecure:  o.choice("tls", "on", "on", "off") == "off",
		PathStyle: o.choice("path-style", "off", "on", "off") == "on",
	}
	if prefix := strings.Trim(u.Path, "/"); prefix != "" {
		r.Prefix = prefix + "/"
	}
	var err error
	r.AccessKey, err = o.secret("access-key")
	o.fail(err)
	r.SecretKey, err = o.secret("secret-key")
	o.fail(err)
	r.SessionToken, err = o.secret("session-token")
	o.fail(err)
	if ca := o.text("tls-ca-file", ""); ca != "" {
		r.TLS, err = tlsConfig(ca, "")
		o.fail(err)
	}
	return func(n *Needs) (Opened, error) {
		r.OnState = n.onState("s3")
		s, err := s3.Open(r)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Close: s.Close}, nil
	}
}

// readRedisTier reads redis://[USER@]HOST:PORT[,HOST:PORT...][/DATABASE]. rediss:// uses TLS.
func readRedisTier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	r := redis.Options{
		Addresses:  strings.Split(u.Host, ","),
		Username:   u.User.Username(),
		Prefix:     o.text("prefix", ""),
		TTL:        o.duration("ttl", redis.MinTTL, redis.MaxTTL),
		MasterName: o.text("master", ""),
	}
	switch o.choice("mode", "single", "single", "cluster", "sentinel") {
	case "cluster":
		r.Mode = redis.Cluster
	case "sentinel":
		r.Mode = redis.Sentinel
	}
	if path := strings.Trim(u.Path, "/"); path != "" {
		n, err := strconv.Atoi(path)
		if err != nil {
			err = fmt.Errorf("database %q, allowed: a number", path)
		}
		r.Database = n
		o.fail(err)
	}
	var err error
	r.Password, err = o.secret("password")
	o.fail(err)
	ca, name := o.text("tls-ca-file", ""), o.text("tls-server-name", "")
	if u.Scheme == "rediss" {
		r.TLS, err = tlsConfig(ca, name)
		o.fail(err)
	} else if ca+name != "" {
		o.fail(errors.New("tls-ca-file and tls-server-name: allowed with rediss://"))
	}
	return func(n *Needs) (Opened, error) {
		r.OnState = n.onState("redis")
		s, err := redis.Open(r)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Close: s.Close}, nil
	}
}

// tlsConfig returns a configuration that trusts the system's authorities, or those of a file.
func tlsConfig(caFile, serverName string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName}
	if caFile == "" {
		return c, nil
	}
	var err error
	if c.RootCAs, err = secret.Authorities(caFile); err != nil {
		return nil, fmt.Errorf("tls-ca-file: %w", err)
	}
	return c, nil
}

// readMooncakeTier reads mooncake://MASTER:PORT. master=etcd://HOST:PORT;HOST:PORT gives several
// masters of which one leads.
func readMooncakeTier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	r := mooncake.Options{
		Master:   o.text("master", u.Host),
		Protocol: o.choice("protocol", "tcp", "tcp", "rdma"),
		Devices:  o.text("devices", ""),
		Host:     o.text("host", ""),
		Python:   o.text("python", ""),
		Segment:  o.size("segment", 0, mooncake.MaxSegment),
		Replicas: o.count("replicas", mooncake.MaxReplicas),
		Prefix:   o.text("prefix", ""),
	}
	var err error
	r.Metadata, err = o.secret("metadata")
	o.fail(err)
	if plain := o.text("metadata", ""); plain != "" {
		r.Metadata = plain
		if m, err := url.Parse(plain); err != nil || m.User != nil {
			o.fail(errors.New("metadata: has a user or is no URL, " +
				"allowed: metadata-file or metadata-env for one with a password"))
		}
	}
	if password, err := o.secret("redis-password"); err != nil {
		o.fail(err)
	} else if password != "" {
		r.Env = append(r.Env, "MC_REDIS_PASSWORD="+password)
	}
	return func(n *Needs) (Opened, error) {
		r.OnState = n.onState("mooncake")
		base, fd := n.Staging.Memory()
		r.Arena = mooncake.Memory{Base: base, FD: fd}
		s, err := mooncake.Open(r)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Close: s.Close}, nil
	}
}
