package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// secured signs in as each file of settings says, writes and reads what it may, and is refused what it may not.
func secured(r *report, files []string) {
	for _, file := range files {
		way := strings.TrimSuffix(filepath.Base(file), ".properties")
		r.check("go, "+way, func(ctx context.Context) error {
			return signIn(ctx, file, "alice-go-"+strings.ToLower(way))
		})
	}
}

func signIn(ctx context.Context, file, name string) error {
	settings, err := readSettings(file)
	if err != nil {
		return err
	}
	options, err := securityOf(settings)
	if err != nil {
		return err
	}
	options = append(options, kgo.ConsumeTopics(name), kgo.ConsumerGroup(name),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	if _, err := kadm.NewClient(client).CreateTopic(ctx, 1, 1, nil, name); err != nil {
		return err
	}
	if err := client.ProduceSync(ctx, &kgo.Record{Topic: name, Value: []byte("x")}).FirstErr(); err != nil {
		return err
	}
	refused := client.ProduceSync(ctx, &kgo.Record{Topic: "forbidden", Value: []byte("x")}).FirstErr()
	if !errors.Is(refused, kerr.TopicAuthorizationFailed) {
		return fmt.Errorf("a topic that is not allowed got %v", refused)
	}
	_, err = take(ctx, client, 1)
	return err
}

func readSettings(file string) (map[string]string, error) {
	text, err := os.ReadFile(file)
	settings := map[string]string{}
	for _, line := range strings.Split(string(text), "\n") {
		if name, value, found := strings.Cut(line, "="); found {
			settings[name] = value
		}
	}
	return settings, err
}

func securityOf(settings map[string]string) ([]kgo.Opt, error) {
	authorities := x509.NewCertPool()
	pem, err := os.ReadFile(settings["ssl.truststore.location"])
	if err != nil {
		return nil, err
	}
	authorities.AppendCertsFromPEM(pem)
	config := &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}
	if pair := settings["ssl.keystore.location"]; pair != "" {
		certificate, err := tls.LoadX509KeyPair(pair, pair)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	options := []kgo.Opt{kgo.SeedBrokers(settings["bootstrap.servers"]), kgo.DialTLSConfig(config)}
	user, password := settings["trial.user"], settings["trial.password"]
	switch settings["sasl.mechanism"] {
	case "PLAIN":
		options = append(options, kgo.SASL(plain.Auth{User: user, Pass: password}.AsMechanism()))
	case "SCRAM-SHA-256":
		options = append(options, kgo.SASL(scram.Auth{User: user, Pass: password}.AsSha256Mechanism()))
	case "SCRAM-SHA-512":
		options = append(options, kgo.SASL(scram.Auth{User: user, Pass: password}.AsSha512Mechanism()))
	case "OAUTHBEARER":
		options = append(options, kgo.SASL(oauth.Auth{Token: settings["trial.token"]}.AsMechanism()))
	}
	return options, nil
}
