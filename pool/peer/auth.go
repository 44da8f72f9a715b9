package peer

import (
	"crypto/tls"
	"fmt"

	"github.com/kvagent/kvagent/secret"
)

// MinKey and MaxKey bound the bytes of a shared key.
const (
	MinKey = 32
	MaxKey = 4096
)

// Auth is how two agents know each other: by a shared key, or by certificates. LoadKey and LoadTLS
// make one; the zero value is none.
type Auth struct {
	key []byte
	tls *tls.Config
}

func (a *Auth) given() bool { return len(a.key) > 0 || a.tls != nil }

// String names the kind, and nothing secret.
func (a Auth) String() string {
	switch {
	case a.tls != nil:
		return "tls"
	case len(a.key) > 0:
		return "key"
	}
	return "none"
}

// GoString is String: a key is not printed by mistake.
func (a Auth) GoString() string { return a.String() }

// Key returns the Auth of a shared key of MinKey to MaxKey bytes. Every byte after the handshake is
// authenticated under it. It does not encrypt.
func Key(key []byte) (Auth, error) {
	if len(key) < MinKey || len(key) > MaxKey {
		return Auth{}, fmt.Errorf("%d bytes, allowed: %d to %d", len(key), MinKey, MaxKey)
	}
	return Auth{key: append([]byte(nil), key...)}, nil
}

// LoadKey reads a shared key from a file that only its owner may read, or also a group of this
// process. All bytes of the file count.
func LoadKey(path string) (a Auth, err error) {
	key, err := secret.ReadPrivate(path)
	if err == nil {
		a, err = Key(key)
	}
	if err != nil {
		return Auth{}, fmt.Errorf("--peer-key-file %s: %w", path, err)
	}
	return a, nil
}

// LoadTLS reads a certificate, its key, and the authorities that signed the certificates of the
// other agents. Both sides prove theirs, in TLS 1.3. A client also checks that the certificate is
// of the host that it connects to.
func LoadTLS(cert, key, authorities string) (Auth, error) {
	pair, err := secret.Pair(cert, key)
	if err != nil {
		return Auth{}, err
	}
	pool, err := secret.Authorities(authorities)
	if err != nil {
		return Auth{}, err
	}
	return Auth{tls: &tls.Config{
		Certificates: []tls.Certificate{pair},
		RootCAs:      pool,
		ClientCAs:    pool,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		MinVersion:   tls.VersionTLS13,
	}}, nil
}
