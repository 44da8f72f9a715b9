package tierspec

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvagent/kvagent/pool/redis"
)

// readRedisTier reads redis://[USER@]HOST:PORT[,HOST:PORT...][/DATABASE]; rediss:// is with TLS.
func readRedisTier(u *url.URL, o *options) func(*Needs) (Opened, error) {
	r := redis.Options{
		Addresses: strings.Split(u.Host, ","), Username: u.User.Username(), Prefix: o.text("prefix", ""),
		TTL:        o.duration("ttl", 0, redis.MaxTTL),
		ChunkBytes: int(o.size("chunk", redis.MinChunkBytes, redis.MaxChunkBytes)), Concurrency: o.count("concurrency", 256),
		DialTimeout: o.duration("dial-timeout", 10*time.Millisecond, time.Minute), Silence: o.duration("silence", 100*time.Millisecond, time.Minute),
		MasterName: o.text("master", ""),
	}
	if r.TTL > 0 && r.TTL < time.Second {
		o.fail(fmt.Errorf("ttl: %v, allowed: %v to %v, or 0", r.TTL, time.Second, redis.MaxTTL))
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
		r.OnState = n.told("redis")
		s, err := redis.Open(r)
		if err != nil {
			return Opened{}, err
		}
		return Opened{Store: s, Close: s.Close}, nil
	}
}

// tlsConfig trusts the system's authorities, or those of a file.
func tlsConfig(caFile, serverName string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName}
	if caFile == "" {
		return c, nil
	}
	text, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("tls-ca-file: %w", err)
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("tls-ca-file: %s has no certificate", caFile)
	}
	return c, nil
}
